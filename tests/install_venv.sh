#!/bin/sh
# Debian and Ubuntu ship Python without its venv module: install the package, where this user may.
set -eu
package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ]; then
    sudo=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    echo "error: $1 has no venv module: sudo apt-get install $package" >&2
    exit 2
fi
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "$package"
