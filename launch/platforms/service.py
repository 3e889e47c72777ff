"""Call the training service of Huawei ModelArts through the vendor's SDK (huaweicloudsdkmodelarts).

    service = connect(endpoint, project_id)
    job_id = service.create(body)

The environment holds the keys under the SDK's names: HUAWEICLOUD_SDK_AK, HUAWEICLOUD_SDK_SK, and
HUAWEICLOUD_SDK_SECURITY_TOKEN for temporary keys. Errors are one line with the service's code, message and
request id, and never contain a key.
"""

import logging
import os
import re
import sys
import urllib.parse
from typing import Any, NamedTuple

from common.ground.exits import BadInput, import_optional
from common.object_store.location import is_clear_text

_PACKAGE = "huaweicloudsdkmodelarts"
_KEYS = ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN")
DOMAIN = "myhuaweicloud.com"
_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d+)?|\[[0-9a-fA-F:.]+\](:\d+)?")
_RETRIES = 8  # times that the SDK repeats a request, within about 5 seconds
_TIMEOUT = (10, 60)  # seconds: to connect, to wait for a byte


class ServiceError(BadInput):
    """A request that the service refused or did not answer. status: the HTTP status; None without an
    answer."""

    def __init__(self, message: str, status: int | None):
        super().__init__(message)
        self.status = status

    @property
    def is_temporary(self) -> bool:
        """Return whether the same request may succeed later."""
        return self.status is None or self.status == 429 or self.status >= 500


class Preview(NamedTuple):
    """The end of a task's log. content: the last `current_size` of its `full_size` bytes."""

    content: str
    current_size: int
    full_size: int


def find_endpoint(region: str = "", url: str = "") -> str:
    """Return the service's URL: from the arguments, else from MODELARTS_ENDPOINT or MODELARTS_REGION.

    The URL is built from the region's name, because the SDK's own table has a wrong host for ap-southeast-1.
    Raises BadInput.
    """
    if not url and not region and not (url := os.environ.get("MODELARTS_ENDPOINT", "")):
        region = os.environ.get("MODELARTS_REGION", "")
    url = (url or (f"https://modelarts.{region}.{DOMAIN}" if region else "")).rstrip("/")
    if not url:
        raise BadInput("no region: set it in job.toml, or the variable MODELARTS_REGION (cn-north-4, ...)")
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not _HOST.fullmatch(host):
        raise BadInput("the endpoint is not https://host")
    if is_clear_text(url):
        raise BadInput(f"the endpoint {url} is not encrypted: https:// is needed for any other machine")
    return url


def find_project(given: str | None = None) -> str:
    """Return the project's id: `given`, else HUAWEICLOUD_SDK_PROJECT_ID. Raises BadInput."""
    project = given or os.environ.get("HUAWEICLOUD_SDK_PROJECT_ID")
    if not project:
        raise BadInput("no project: set project_id in job.toml, or the variable HUAWEICLOUD_SDK_PROJECT_ID")
    return project


def connect(endpoint: str, project_id: str) -> "ModelArts":
    """Return a client of the service. It sends nothing yet.

    Print a warning if the host is neither the vendor's nor this machine, and not in MODELARTS_ENDPOINT.
    Raises BadInput if the SDK or the keys are missing.
    """
    sdk = import_optional(f"{_PACKAGE}.v1", "the vendor's SDK cannot be imported", _PACKAGE)
    missing = [name for name in _KEYS[:2] if not os.environ.get(name)]
    if missing:
        raise BadInput(f"no key of the account: set the variables {' and '.join(missing)}")
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    named = endpoint == os.environ.get("MODELARTS_ENDPOINT", "").rstrip("/")
    if not (named or host.endswith(f".{DOMAIN}") or endpoint.startswith("http:")):
        warning = f"warning: {endpoint} is not a host of {DOMAIN}: it receives requests signed with your keys"
        print(warning, file=sys.stderr, flush=True)
    return ModelArts(sdk, endpoint, project_id)


class ModelArts:
    """A client for the jobs of one project. Methods raise ServiceError."""

    def __init__(self, sdk: Any, endpoint: str, project_id: str):
        from huaweicloudsdkcore.auth.credentials import BasicCredentials
        from huaweicloudsdkcore.exceptions.exceptions import SdkException
        from huaweicloudsdkcore.http.http_config import HttpConfig
        from requests.exceptions import RequestException

        keys = [os.environ.get(name, "") for name in _KEYS]
        self._secrets = [key for key in keys if key]
        credentials = BasicCredentials(keys[0], keys[1], project_id)
        if keys[2]:
            credentials = credentials.with_security_token(keys[2])
        config = HttpConfig(timeout=_TIMEOUT, retry_times=0)
        builder = sdk.ModelArtsClient.new_builder().with_credentials(credentials)
        self._client = builder.with_http_config(config).with_endpoint(endpoint).build()
        self._sdk, self._host = sdk, urllib.parse.urlsplit(endpoint).netloc
        # the SDK also raises the errors of requests and of its own parser
        self._errors = (SdkException, RequestException, ValueError, TypeError, AttributeError)
        # without a handler Python also prints the SDK's errors
        logging.getLogger("HuaweiCloud-SDK-ModelArtsClient").addHandler(logging.NullHandler())

    def create(self, body: dict[str, Any]) -> str:
        """Create a job and return its id. A request that may have been accepted is not repeated."""
        request = self._sdk.CreateTrainingJobRequest(body=body)
        return self._ask("create_training_job", request, "metadata", repeat=False)["metadata"]["id"]

    def show(self, job_id: str) -> dict[str, Any]:
        """Return the service's description of a job."""
        request = self._sdk.ShowTrainingJobDetailsRequest(training_job_id=job_id)
        return self._ask("show_training_job_details", request, "status")

    def list_events(self, job_id: str, limit: int) -> list[dict[str, Any]]:
        """Return the last events, the newest first; limit: 1 to 100."""
        request = self._sdk.ListTrainingJobEventsRequest(
            training_job_id=job_id, limit=limit, offset=0, order="desc", x_language="en-us"
        )
        return self._ask("list_training_job_events", request, "events")["events"]

    def read_log(self, job_id: str, task: str) -> Preview:
        """Return the end of a task's log: at most 5 MiB."""
        request = self._sdk.ShowTrainingJobLogsPreviewRequest(training_job_id=job_id, task_id=task)
        answer = self._ask("show_training_job_logs_preview", request, "content")
        size = int(answer.get("current_size", len(answer["content"].encode())))
        return Preview(answer["content"], size, int(answer.get("full_size", size)))

    def stop(self, job_id: str) -> None:
        """Ask the service to stop a job, without waiting for its end."""
        action = self._sdk.JobActionType(action_type="terminate")
        self._ask("stop_training_job", self._sdk.StopTrainingJobRequest(training_job_id=job_id, body=action))

    def _ask(self, call: str, request: object, needed: str = "", repeat: bool = True) -> dict[str, Any]:
        """Send a request, let the SDK repeat it after a temporary failure, and return the answer.

        call: the SDK's method
        needed: a key of every valid answer; the SDK also accepts other text, such as a web page
        repeat: False for a request that may only be repeated if the service refused it (HTTP 429)
        """
        from huaweicloudsdkcore.retry.backoff_strategy import BackoffStrategies
        from huaweicloudsdkcore.utils.http_utils import sanitize_for_serialization

        def is_repeatable(answer: object, error: Exception | None) -> bool:
            status = getattr(error, "status_code", None)
            return error is not None and (status == 429 or (repeat and (status is None or status >= 500)))

        invoker = getattr(self._client, f"{call}_invoker")(request)
        invoker.with_retry(is_repeatable, _RETRIES, BackoffStrategies.EQUAL_JITTER)
        try:
            answer = sanitize_for_serialization(invoker.invoke())
            if needed and needed not in answer:
                raise ValueError(f"the answer has no {needed}")
            return answer
        except self._errors as error:
            raise self._explain(call.replace("_", " "), error) from error

    def _explain(self, what: str, error: Exception) -> ServiceError:
        status = getattr(error, "status_code", None)
        if status is None:
            cause = self._clean(f"{type(error).__name__}: {getattr(error, 'error_msg', None) or error}")
            return ServiceError(f"{what}: no usable answer from {self._host} ({cause})", None)
        message = self._clean(f"{getattr(error, 'error_code', '')} {getattr(error, 'error_msg', '')}")
        request_id = getattr(error, "request_id", None) or "unknown"
        return ServiceError(f"{what}: {message} (HTTP {status}, request id {request_id})", status)

    def _clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= 500 else f"{text[:500]}..."
