"""aotpack in the libraries that trainers are made of."""
