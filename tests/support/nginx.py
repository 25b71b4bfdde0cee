"""nginx with the configuration of the guide, before a server of the test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.pages import ROOT, Block, blocks_of
from tests.support.processes import PATIENCE, until
from tests.support.redis_servers import free_port

PAGE: Final = (ROOT / "docs" / "guide" / "behind-a-proxy.md").read_text("utf-8")
NAME: Final = "agents.example.com"
_PATH: Final = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin"  # which users other than root may lack
#: All that the guide does not show: one process in the foreground, whose files are in the directory of the test.
_AROUND: Final = """
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 100; }}
http {{
    access_log off;
    {temporary}
    include guide.conf;
}}
"""
_TEMPORARY: Final = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def missing() -> str | None:
    """What is not installed here."""
    absent = [each for each in ("nginx", "openssl") if shutil.which(each, path=_PATH) is None]
    return " and ".join(absent) or None


def configuration() -> str:
    """The configuration in the guide."""
    [found] = re.findall(r"^```nginx\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def blocks(begin: str) -> list[Block]:
    """The shell blocks of the guide that begin with this text."""
    return [each for each in blocks_of(PAGE) if each.text.startswith(begin)]


def serve_options() -> list[str]:
    """The options of `agent-runtime serve` in the guide, without the store."""
    [block] = blocks("agent-runtime serve --db agents.db")
    options = shlex.split(block.text)
    assert options.pop() == "&"
    return options[4:]


class Nginx:
    """A running nginx with the configuration of the guide, until the end of the block.

    Args:
        directory: Where its files are.
        upstream: The port of the server on 127.0.0.1.
    """

    def __init__(self, directory: Path, upstream: int) -> None:
        self._directory = directory
        self.port: int = free_port()
        self.plain_port: int = free_port()
        self.certificate: Path = directory / "certificate.pem"
        text = configuration()
        for shown, used in {
            "listen 80;": f"listen 127.0.0.1:{self.plain_port};",
            "listen 443 ssl http2;": f"listen 127.0.0.1:{self.port} ssl http2;",
            "http://127.0.0.1:8000;": f"http://127.0.0.1:{upstream};",
            f"/etc/ssl/certs/{NAME}.pem": str(self.certificate),
            f"/etc/ssl/private/{NAME}.key": str(directory / "key.pem"),
        }.items():
            assert text.count(shown) == 1, shown
            text = text.replace(shown, used)
        (directory / "guide.conf").write_text(text)
        temporary = " ".join(f"{each}_temp_path {directory / each};" for each in _TEMPORARY)
        (directory / "nginx.conf").write_text(_AROUND.format(temporary=temporary))

    def __enter__(self) -> Self:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}",
             "-keyout", self._directory / "key.pem", "-out", self.certificate],
            check=True, capture_output=True, timeout=PATIENCE,
        )  # fmt: skip
        binary = shutil.which("nginx", path=_PATH)
        assert binary is not None
        with (self._directory / "nginx.log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary, "-p", self._directory, "-c", "nginx.conf", "-e", "stderr"], stdout=log, stderr=log
            )
        try:
            until(lambda: self._process.poll() is not None or self._accepts(), "nginx accepts connections")
            assert self._process.poll() is None, self.log
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)

    @property
    def log(self) -> str:
        """What nginx has written."""
        return (self._directory / "nginx.log").read_text("utf-8", "replace")

    def trusted(self) -> ssl.SSLContext:
        """The settings of a client that trusts this certificate only."""
        return ssl.create_default_context(cafile=self.certificate)

    def connected(self) -> socket.socket:
        """A connection to the port with TLS."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE)

    def _accepts(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0
