"""Mutual TLS 1.3: who is admitted, who is not, and what is told of wrong files."""

import shutil
import socket
import ssl
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.core import TransportError
from harness.transport.tls import TlsFiles

OPENSSL = shutil.which("openssl")


@dataclass(frozen=True)
class Authority:
    """A certificate authority of a test, by the openssl command."""

    place: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.place / f"{self.name}.pem"

    def issue(self, name: str, alternative: str) -> TlsFiles:
        stem = self.place / f"{self.name}-{name}"
        certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
        openssl(
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout {key} "
            f"-out {certificate} -subj /CN={name} -addext subjectAltName={alternative} "
            f"-addext basicConstraints=critical,CA:FALSE "
            f"-CA {self.certificate} -CAkey {self.certificate.with_suffix('.key')}"
        )
        return TlsFiles(certificate, key, self.certificate)


def openssl(arguments: str) -> None:
    assert OPENSSL is not None, "these tests need the openssl command"
    subprocess.run([OPENSSL, *arguments.split()], check=True, capture_output=True)


def new_authority(place: Path, name: str) -> Authority:
    made = Authority(place, name)
    openssl(
        f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
        f"-keyout {made.certificate.with_suffix('.key')} -out {made.certificate} -subj /CN={name}"
    )
    return made


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return new_authority(tmp_path_factory.mktemp("tls"), "testbed")


@pytest.fixture(scope="module")
def node(authority: Authority) -> TlsFiles:
    return authority.issue("node", "IP:10.80.0.2,DNS:decode-3.example")


def shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, dialled: str
) -> tuple[str | None, str]:
    """What both ends end with: the client's TLS version, or the error of either."""
    ends = socket.socketpair()
    outcome: list[str] = []

    def serve() -> None:
        with ends[1]:
            try:
                with server.wrap_socket(ends[1], server_side=True) as wrapped:
                    wrapped.sendall(wrapped.recv(5))
                    outcome.append(str(wrapped.version()))
            except OSError as error:  # ssl.SSLError is one
                outcome.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    answer = None
    try:
        ends[0].settimeout(20)
        with client.wrap_socket(ends[0], server_hostname=dialled) as wrapped:
            wrapped.sendall(b"hello")
            # With TLS 1.3 the client's own refusal by the server comes with its first read.
            answer = wrapped.version() if wrapped.recv(5) == b"hello" else None
    except OSError as error:
        answer = str(error)
    finally:
        ends[0].close()
        thread.join()
    return answer, outcome[0]


@pytest.mark.parametrize("dialled", ["10.80.0.2", "decode-3.example"])
def test_two_members_speak_tls_1_3(node: TlsFiles, dialled: str) -> None:
    ends = shake_hands(node.client_context(), node.server_context(), dialled)
    assert ends == ("TLSv1.3", "TLSv1.3")


@pytest.mark.parametrize("dialled", ["10.80.0.3", "decode-4.example"])
def test_a_member_at_another_address_is_refused_by_the_dialling_end(
    node: TlsFiles, dialled: str
) -> None:
    client, _ = shake_hands(node.client_context(), node.server_context(), dialled)
    assert client is not None
    assert "certificate is not valid for" in client or "mismatch" in client


def test_a_peer_without_a_certificate_is_refused(node: TlsFiles) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(node.authority)
    client, server = shake_hands(bare, node.server_context(), "10.80.0.2")
    assert "peer did not return a certificate" in server.replace("_", " ").lower()
    assert client != "TLSv1.3"


def test_a_peer_of_another_authority_is_refused_by_either_end(
    authority: Authority, node: TlsFiles, tmp_path: Path
) -> None:
    other = new_authority(tmp_path, "testbed").issue("node", "IP:10.80.0.2")  # the same names
    client, server = shake_hands(
        replace(other, authority=authority.certificate).client_context(),
        node.server_context(),
        "10.80.0.2",
    )
    assert "verify failed" in server
    assert client != "TLSv1.3"
    client, _ = shake_hands(node.client_context(), other.server_context(), "10.80.0.2")
    assert client is not None
    assert "verify failed" in client


def test_a_node_does_not_trust_a_peer_for_showing_its_own_certificate(tmp_path: Path) -> None:
    """Only the authority file is trusted: a self-signed own certificate admits nobody."""
    node = new_authority(tmp_path, "self")
    other = new_authority(tmp_path, "other")
    files = TlsFiles(node.certificate, node.certificate.with_suffix(".key"), other.certificate)
    _, server = shake_hands(files.client_context(), files.server_context(), "self")
    assert "TLSv1.3" not in server


def test_tls_1_2_is_refused(node: TlsFiles) -> None:
    old = node.client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    client, server = shake_hands(old, node.server_context(), "10.80.0.2")
    assert "protocol" in server.lower()
    assert client != "TLSv1.2"


@pytest.mark.parametrize("role", ["certificate", "key", "authority"])
@pytest.mark.parametrize("content", [None, "no PEM at all"])
def test_a_wrong_file_is_named(
    node: TlsFiles, tmp_path: Path, role: str, content: str | None
) -> None:
    path = tmp_path / "wrong.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TransportError, match=rf"the {role} file {path} ") as caught:
        TlsFiles(
            **{"certificate": node.certificate, "key": node.key, "authority": node.authority}
            | {role: path}
        ).server_context()
    assert "\n" not in str(caught.value)


def test_the_key_of_another_certificate_and_an_encrypted_key_are_named(
    authority: Authority, node: TlsFiles, tmp_path: Path
) -> None:
    other = authority.issue("another", "IP:10.80.0.9")
    with pytest.raises(TransportError, match="is not the key of the certificate in"):
        replace(node, key=other.key).client_context()
    locked = tmp_path / "locked.key"
    openssl(f"ec -in {node.key} -aes128 -passout pass:x -out {locked}")
    with pytest.raises(TransportError, match=rf"{locked} is encrypted"):
        replace(node, key=locked).client_context()
