"""One module a command. What a command needs of torch is imported when the command runs."""
