"""A range of a file behind a URL, whatever the server does."""

import dataclasses
import functools
import subprocess
import sys
import time
import tracemalloc

import fsspec
import pytest

from aotpack.errors import AotpackError, HostError, InputError
from aotpack.store.remote import RemoteSource
from aotpack.store.urls import is_url, scrubbed, shown, sibling

AGAIN = "check the network and the server, and try again: what was fetched is not fetched again"


@pytest.fixture
def opened(url, patience):
    return functools.partial(RemoteSource, url, patience=dataclasses.replace(patience, piece=500))


def said(call):
    with pytest.raises(AotpackError) as caught:
        call()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


@pytest.mark.parametrize(
    ("place", "url"),
    [
        ("s3://bucket/x", True),
        ("https://host/x", True),
        ("HF://a/b", True),
        ("x.aotpack", False),
        ("/a/b://c", False),
        ("C:/x", False),
        ("", False),
    ],
)
def test_a_url_is_told_from_a_path(place, url):
    assert is_url(place) is url


@pytest.mark.parametrize(
    ("url", "harmless"),
    [
        ("https://u:secret@h:8/a/b?X-Amz-Signature=secret#secret", "https://h:8/a/b"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("hf://owner/name@main/x", "hf://owner/name@main/x"),
        ("memory://a/b", "memory://a/b"),
        ("file:///a/b", "file:///a/b"),
    ],
)
def test_a_url_is_shown_without_secrets(url, harmless):
    assert shown(url) == harmless
    assert scrubbed(f"403, url='{url}'") == f"403, url='{harmless}'"


def test_a_url_that_is_not_well_formed_is_refused_without_secrets():
    with pytest.raises(InputError, match="a https:// URL is not well-formed") as caught:
        RemoteSource("https://u:secret@[x/y")
    assert "secret" not in str(caught.value)
    assert scrubbed("no https://u:secret@[x/y here") == "no https://... here"


def test_a_file_beside_has_its_suffix_before_the_query():
    assert sibling("https://h/x?a=b", ".sig") == "https://h/x.sig?a=b"
    assert sibling("memory://x", ".sig") == "memory://x.sig"


@pytest.mark.parametrize("protocol", ["http", "memory", "file"])
def test_a_range_is_read(protocol, url, tiny, tmp_path, patience):
    fsspec.filesystem("memory").pipe("/remote/tiny", tiny)
    (tmp_path / "tiny").write_bytes(tiny)
    urls = {"http": url, "memory": "memory://remote/tiny", "file": f"file://{tmp_path}/tiny"}
    source = RemoteSource(urls[protocol], patience=patience)
    assert (source.name, source.size) == (urls[protocol], len(tiny))
    assert source.read_range(100, 1700) == tiny[100:1800]
    assert source.read_range(len(tiny) - 10, 50) == tiny[-10:]
    assert source.read_range(len(tiny), 10) == b""


def test_only_what_was_asked_for_is_sent(opened, server):
    counted = []
    opened(on_bytes=counted.append).read_range(7, 1001)
    assert server.sent == sum(counted) == 1001
    assert [request.range for request in server.requests] == [
        None,
        "bytes=7-506",
        "bytes=507-1006",
        "bytes=1007-1007",
    ]


def test_a_server_that_recovers_is_waited_for(opened, server, tiny):
    server.faults = ["503", "503", "503", "503", "", "503", "503"]
    assert opened().read_range(5, 100) == tiny[5:105]


@pytest.mark.parametrize("fault", ["drop", "truncate", "stall", "too-much", "503"])
def test_a_passing_fault_is_survived(opened, server, tiny, fault):
    source = opened()
    server.faults = [fault]
    assert source.read_range(5, 100) == tiny[5:105]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drop", "Response payload is not completed"),
        ("stall", "no answer in time"),
        ("too-much", "107 bytes came where 100 were asked for"),
        ("503", "HTTP status 503 Service Unavailable"),
    ],
)
def test_a_lasting_fault_is_named(opened, server, url, fault, reason):
    source = opened()
    server.always = fault
    started = time.monotonic()
    error = said(lambda: source.read_range(5, 100))
    assert time.monotonic() - started < 8
    assert isinstance(error, HostError)
    assert error.problem == f"{url} cannot be read"
    assert error.found.startswith(reason)
    assert error.found.endswith(", 3 times")
    assert error.remedy == AGAIN


def test_what_was_read_before_a_drop_is_not_read_again(opened, server, tiny):
    source = opened()
    server.faults = ["", "", "drop", ""]
    assert source.read_range(0, 1700) == tiny[:1700]
    assert [request.range for request in server.requests[1:]] == [
        "bytes=0-499",
        "bytes=500-999",
        "bytes=1000-1499",
        "bytes=1000-1499",
        "bytes=1500-1699",
    ]


@pytest.mark.parametrize("first", [0, 900])
def test_a_server_without_ranges_is_read_from_its_start(opened, server, tiny, first):
    server.always = "ignore-range"
    source = opened()
    with pytest.warns(UserWarning, match="ignores ranges: each read starts at the first byte"):
        assert source.read_range(first, 700) == tiny[first : first + 700]


def test_a_server_without_ranges_fills_no_memory(url, server):
    server.files["/tiny.aotpack"] = bytes(60 << 20)
    server.always = "ignore-range"
    source = RemoteSource(url)
    tracemalloc.start()
    with pytest.warns(UserWarning, match="ignores ranges"):
        source.read_range(20 << 20, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_large_range_takes_its_size_and_a_piece(tmp_path):
    (tmp_path / "large").write_bytes(bytes(64 << 20))
    source = RemoteSource(f"file://{tmp_path}/large")
    tracemalloc.start()
    data = source.read_range(0, 64 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) == 64 << 20
    assert peak < (64 << 20) * 1.2 + 3 * (4 << 20)


def test_a_redirect_is_followed(server, url, tiny, patience):
    server.redirects["/moved"] = f"{url}?token=secret"
    source = RemoteSource(server.url("/moved"), patience=patience)
    assert source.read_range(5, 100) == tiny[5:105]


def test_a_file_that_is_missing_is_an_input_error(server, patience):
    error = said(lambda: RemoteSource(server.url("/nothing?sig=secret"), patience=patience))
    assert isinstance(error, InputError)
    assert str(error) == (
        f"there is no package at {server.url('/nothing')}\n"
        "  what to do: check the URL, or push the package to it"
    )
    assert len(server.requests) == 2, "HEAD and GET, once each"


@pytest.mark.parametrize("status", ["401", "403"])
def test_refused_credentials_say_what_to_do_and_no_secret(server, patience, status):
    server.always = status
    url = f"http://user:secret@127.0.0.1:{server.port}/tiny.aotpack?X-Amz-Signature=secret"
    error = said(lambda: RemoteSource(url, patience=patience))
    assert isinstance(error, HostError)
    assert error.problem.endswith("/tiny.aotpack may not be read with the credentials of this process")
    assert error.remedy == "log in, or set the credentials of this service in the environment"
    assert "secret" not in str(error)
    assert len(server.requests) == 2


def test_secrets_of_a_redirect_are_not_said(server, patience):
    server.redirects["/moved"] = server.url("/gone?X-Amz-Signature=secret")
    server.files["/gone"] = b"x" * 100
    source = RemoteSource(server.url("/moved"), patience=patience)
    server.always = "503"
    assert "secret" not in str(said(lambda: source.read_range(0, 10)))


def test_nobody_listening_is_a_host_error(patience):
    error = said(lambda: RemoteSource("http://127.0.0.1:9/x", patience=patience))
    assert isinstance(error, HostError)
    assert error.found.startswith("Cannot connect to host 127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://b/x", "s3fs", "s3"),
        ("https://h/x", "aiohttp", "http"),
        ("hf://a/b/x", "huggingface_hub", "hf"),
    ],
)
def test_a_missing_backend_names_what_to_install(url, module, extra):
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"from aotpack.store.remote import RemoteSource; RemoteSource({url!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    protocol = url.partition(":")[0]
    assert done.stderr.endswith(
        f"aotpack.errors.HostError: the package that reads {protocol}:// URLs is not installed\n"
        f"  expected: {module}\n"
        f"  what to do: pip install 'aotpack[{extra}]', or {module} alone\n"
    )


def test_an_unknown_protocol_is_an_input_error():
    error = said(lambda: RemoteSource("carrier-pigeon://coop/x"))
    assert isinstance(error, InputError)
    assert error.found is None
    assert "carrier-pigeon" in error.problem


def test_a_folder_is_an_input_error(tmp_path):
    error = said(lambda: RemoteSource(f"file://{tmp_path}"))
    assert str(error) == f"file://{tmp_path} is a folder\n  what to do: name an .aotpack file in it"
