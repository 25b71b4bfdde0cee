"""What `npm ci` installs: one exact version, checked by its hash, from whatever registry the machine is set to."""

from __future__ import annotations

import json

from tests.wire.server import HERE


def test_the_lock_pins_the_server_and_names_no_registry() -> None:
    manifest = json.loads((HERE / "package.json").read_text("utf-8"))
    assert manifest["devDependencies"] == {"@copilotkit/aimock": "1.43.0"}
    text = (HERE / "package-lock.json").read_text("utf-8")
    assert "http" not in text
    packages = json.loads(text)["packages"]
    installed = {name: package for name, package in packages.items() if name}
    assert {name: package["version"] for name, package in installed.items()} == {
        "node_modules/@copilotkit/aimock": "1.43.0"
    }
    assert all(package["integrity"].startswith("sha512-") for package in installed.values())
