"""Makes certificates for tests, with the openssl command."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """For localhost and 127.0.0.1, signed by itself."""

    cert: str
    key: str

    def client_context(self) -> ssl.SSLContext:
        """Of a client that trusts nobody else."""
        return ssl.create_default_context(cafile=self.cert)


def make_certificate(folder: Path, name: str = "server", *, key: str = "ec", days: int = 2) -> Certificate:
    """`key`: "ec" or "rsa". `days`: 0 for one that has expired."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command, to make certificates")
    made = Certificate(str(folder / f"{name}.crt"), str(folder / f"{name}.key"))
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=critical,CA:false\n")
    kind = ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"] if key == "ec" else ["rsa:2048"]
    _openssl("req", "-new", "-newkey", *kind, "-nodes", "-keyout", made.key, "-out", request, "-subj", "/CN=localhost")
    signing: list[str | Path] = ["-signkey", made.key, "-days", str(days), "-extfile", extensions, "-out", made.cert]
    _openssl("x509", "-req", "-in", request, *signing)
    return made


def encrypt_key(certificate: Certificate, folder: Path) -> str:
    """Path of the same key behind a passphrase."""
    encrypted = folder / "encrypted.key"
    _openssl("pkey", "-in", certificate.key, "-aes256", "-passout", "pass:secret", "-out", encrypted)
    return str(encrypted)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
