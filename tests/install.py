"""Install packages into this Python's environment with uv, by the settings of pip (pip.conf and PIP_*).

    python tests/install.py -r tests/requirements.txt -c constraints.txt

uv does not read pip's settings, and many machines reach their packages only through an index or a folder
that pip.conf names. If uv fails, pip installs.

The hashes of the packages are not checked: an index of wheels for one machine, such as torch for its CUDA,
has other files than PyPI. constraints.txt fixes the versions, and the connection to an index is TLS.
"""

import os
import subprocess
import sys

UV = "uv==0.13.9"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NAMES = {  # pip's setting: uv's environment variable
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def read_settings(lines: str) -> dict[str, str]:
    """Return uv's environment for pip's settings. lines: the output of `pip config list`."""
    # All indexes are asked for every package, as pip does: any of them may have the required version. So an
    # index of pip.conf must be as trusted as PyPI: it can replace any package (dependency confusion).
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for line in lines.splitlines():
        name, _, value = line.partition("=")
        place, _, key = name.partition(".")
        if key in NAMES and place in ("global", "install", ":env:"):
            words = value.strip("'\"").replace("\\n", " ").split()
            variable = NAMES[key]
            found[variable] = (",".join if variable == "UV_FIND_LINKS" else " ".join)(words)
    return found


def main(arguments: list[str]) -> int:
    """Install, and return the exit code."""
    subprocess.run([*PIP, "install", "--quiet", UV], check=False)
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
    if subprocess.run([*command, *arguments], env={**read_settings(listed), **os.environ}).returncode == 0:
        return 0
    print("uv could not install them; trying pip", flush=True)
    return subprocess.run([*PIP, "install", "--quiet", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
