"""What looks like a secret must not be written into a job: its environment and its parameters are stored and
shown in clear, in the console and by the service's API, to everyone who may look at the job."""

import re

from common.exits import BadInput
from launch import secret_scan

_NAME = re.compile(
    r"(^|_|-)(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|APIKEY|SK|AK)(_|-|$)"
    r"|(ACCESS|API|PRIVATE|SECRET|AUTH)_?-?KEY",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")


def refuse(place: str, name: str, value: str) -> None:
    """Raises BadInput, without the value, where a name or a value looks like a secret."""
    found = secret_scan.scan_text("job.toml", f'{name} = "{value}"'.encode())
    if found or _NAME.search(name) or _USER_INFO.search(value):
        raise BadInput(
            f"[{place}] {name} looks like a secret, and everyone who sees the job would see it: give the job "
            "its rights through the platform (an agency on ModelArts, a role on SageMaker, a mounted secret "
            "on Kubernetes)"
        )


def without(text: str) -> str:
    """A text for an error: no user name or password of a URL, and not the end of a long one."""
    text = _USER_INFO.sub("***@", text)
    return text if len(text) <= 120 else f"{text[:120]}..."
