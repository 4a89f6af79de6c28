"""The certificate and key with which the public listener speaks TLS.

Owns the SSLContext, its rules, and the checks of the two files. Never touches a connection.
"""

import os
import ssl
import stat
from contextlib import suppress

_ALPN = ["http/1.1"]
_HANDSHAKE_STEPS = 4
# OpenSSL's reasons. It keeps certificates and keys by algorithm: a key of another algorithm has no certificate.
_MISMATCHES = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED", "NO_PRIVATE_KEY_ASSIGNED"}
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_DATE_PROBLEMS = {9: "not valid yet", 10: "expired"}


class TlsError(Exception):
    """Certificate and key cannot be used. The message has a line for each problem, for the operator."""


class ServerTls:
    """The settings of new handshakes: TLS 1.2 or newer, no renegotiation, only HTTP/1.1 by ALPN."""

    def __init__(self, cert: str, key: str) -> None:
        """`cert`: path of the chain, the server's own certificate first; `key`: path of its key. Both PEM. Raises
        TlsError.

        An expired certificate is accepted: one that was valid at the start must not end a gateway later.
        """
        self.cert = cert
        self.key = key
        self.context = _make_context(cert, key)

    def reload(self) -> None:
        """Read both files again. Raises TlsError, and keeps what was read before. A new context, because a pair that
        does not match would spoil the one in use, and one of another algorithm would be added to it."""
        self.context = _make_context(self.cert, self.key)


def find_problems(cert: str, key: str) -> list[str]:
    """A line for each problem of the two files, with file and reason; an expired certificate is one."""
    try:
        context = _make_context(cert, key)
    except TlsError as error:
        return str(error).splitlines()
    problem = _date_problem(context, cert)
    return [f"{cert}: the certificate is {problem}"] if problem else []


def _make_context(cert: str, key: str) -> ssl.SSLContext:
    problems = [f"{path}: cannot be read: {reason}" for path in (cert, key) if (reason := why_unreadable(path))]
    if not problems:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(_ALPN)
        problem = _why_unusable(context, cert, key)
        if problem is None:
            return context
        problems = [problem]
    raise TlsError("\n".join(problems))


def why_unreadable(path: str) -> str | None:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "is not a regular file"
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


class _HasPassphrase(Exception):
    """Raised when OpenSSL wants a passphrase, for which it would otherwise prompt on a terminal."""


def _why_unusable(context: ssl.SSLContext, cert: str, key: str) -> str | None:
    def refuse() -> str:
        raise _HasPassphrase

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except _HasPassphrase:
        return f"{key}: the key has a passphrase, and nobody can enter it"
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            return f"{key}: the key is not that of the certificate in {cert}"
        if not _holds_certificate(cert):
            return f"{cert}: no certificate in PEM is in it"
        if error.reason is None:
            return f"{key}: no private key in PEM is in it"
        return f"{cert}, {key}: cannot be used: {error.reason}"
    except OSError as error:  # it was readable a moment ago
        return f"{cert}, {key}: cannot be read: {error.strerror}"
    return None


def _holds_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        return False
    return True


def _date_problem(context: ssl.SSLContext, cert: str) -> str | None:
    """The problem with the certificate's dates, found by a handshake in memory with a client that trusts it."""
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags = ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(cafile=cert)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_HANDSHAKE_STEPS):
            for side in (client, server):
                with suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        # Other problems, such as its purpose, are for clients to judge.
        return _DATE_PROBLEMS.get(error.verify_code)
    except ssl.SSLError:
        return None
    return None
