"""Call the training service of Huawei ModelArts through the vendor's SDK (huaweicloudsdkmodelarts).

    job_id = ModelArts(region="cn-north-4").create(body)

The environment holds the keys under the SDK's names: HUAWEICLOUD_SDK_AK, HUAWEICLOUD_SDK_SK, and
HUAWEICLOUD_SDK_SECURITY_TOKEN for temporary keys. Errors are one line with the service's code, message and
request id, and never contain a key.
"""

import logging
import os
import sys
import urllib.parse
from typing import Any

from bootfile.ground.errors import BadInput, import_optional, printable
from common.object_store.location import is_clear_text, is_server

_PACKAGE = "huaweicloudsdkmodelarts"
_KEYS = ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_SECURITY_TOKEN")
_DOMAIN = "myhuaweicloud.com"
_RETRIES = 8  # times that the SDK repeats a request, within about 5 seconds
_TIMEOUT = (10, 60)  # seconds: to connect, to wait for a byte
ENDED = ("Failed", "Completed", "Terminated")  # phases of v2 (vendor's documents): no more is written


class ServiceError(BadInput):
    """A request that the service refused (status: of HTTP) or did not answer (None)."""

    def __init__(self, message: str, status: int | None):
        super().__init__(message)
        self.status = status


def _find_endpoint(region: str, url: str) -> str:
    """Return the service's URL. The SDK's own table of regions has a wrong host for ap-southeast-1."""
    # job.toml comes first: the variables of the environment are for all jobs
    if not url and not region:
        url, region = [os.environ.get(f"MODELARTS_{name}", "") for name in ("ENDPOINT", "REGION")]
    url = url or (f"https://modelarts.{region}.{_DOMAIN}" if region else "")
    url = url.rstrip("/")
    if not is_server(url) or "@" in url:
        given = f"{printable(url.rpartition('@')[2])} is not https://HOST[:PORT]" if url else "no region"
        raise BadInput(f"{given}: set the region in job.toml, or MODELARTS_REGION")
    if is_clear_text(url):
        raise BadInput(f"the endpoint {url} is not encrypted: https:// is needed for any other machine")
    return url


class ModelArts:
    """A client for the jobs of one project. The constructor sends nothing. Methods raise ServiceError.

    region, endpoint: default: MODELARTS_ENDPOINT, else MODELARTS_REGION
    project: default: HUAWEICLOUD_SDK_PROJECT_ID

    Prints a warning if the host is neither the vendor's nor this machine, and not in MODELARTS_ENDPOINT.
    Raises BadInput if the endpoint, the project, the SDK or the keys are missing.
    """

    def __init__(self, region: str = "", endpoint: str = "", project: str | None = None):
        self.endpoint = _find_endpoint(region, endpoint)
        self.project = project or os.environ.get("HUAWEICLOUD_SDK_PROJECT_ID") or ""
        if not self.project:
            raise BadInput("no project: set project_id in job.toml, or HUAWEICLOUD_SDK_PROJECT_ID")
        self._sdk = import_optional(f"{_PACKAGE}.v1", "the vendor's SDK cannot be imported", _PACKAGE)
        from huaweicloudsdkcore.auth.credentials import BasicCredentials
        from huaweicloudsdkcore.exceptions.exceptions import SdkException
        from huaweicloudsdkcore.http.http_config import HttpConfig
        from requests.exceptions import RequestException

        keys = [os.environ.get(name, "") for name in _KEYS]
        if not all(keys[:2]):
            raise BadInput(f"no key of the account: set the variables {' and '.join(_KEYS[:2])}")
        host = urllib.parse.urlsplit(self.endpoint)
        named = os.environ.get("MODELARTS_ENDPOINT", "")
        self._host = host.netloc
        # a host that gets a signed request could use it: a wrong one is named before the first request
        is_known = host.scheme == "http" or f".{host.hostname}".endswith(f".{_DOMAIN}")
        if not is_known and self.endpoint != named.rstrip("/"):
            text = f"{self.endpoint} is not a host of {_DOMAIN}, and requests are signed with your keys"
            print(f"warning: {text}", file=sys.stderr, flush=True)
        self._secrets = [key for key in keys if key]  # no error may show them
        credentials = BasicCredentials(keys[0], keys[1], self.project)
        if keys[2]:  # the keys are temporary
            credentials = credentials.with_security_token(keys[2])
        builder = self._sdk.ModelArtsClient.new_builder().with_credentials(credentials)
        # no retries here: create() must not repeat a request, and _ask() says which ones may be
        builder = builder.with_http_config(HttpConfig(timeout=_TIMEOUT, retry_times=0))
        self._client = builder.with_endpoint(self.endpoint).build()
        # those of the SDK, of requests and of the SDK's parser, and an answer without what is asked for
        self._errors = (SdkException, RequestException, ValueError, TypeError, AttributeError, LookupError)
        # without a handler Python also prints the SDK's errors
        logging.getLogger("HuaweiCloud-SDK-ModelArtsClient").addHandler(logging.NullHandler())

    def create(self, body: dict[str, Any]) -> str:
        """Create a job and return its id. A request that may have been accepted is not repeated."""
        request = self._sdk.CreateTrainingJobRequest(body=body)
        return self._ask("create_training_job", request, "metadata", "id", repeat=False)

    def phase(self, job_id: str) -> str:
        """Return the phase of a job, such as Running."""
        request = self._sdk.ShowTrainingJobDetailsRequest(training_job_id=job_id)
        return self._ask("show_training_job_details", request, "status", "phase")

    def _ask(self, call: str, request: object, table: str, key: str, repeat: bool = True) -> str:
        """Send a request, let the SDK repeat it after a temporary failure, and return a text of the answer.

        call: the SDK's method
        table, key: the place of the text; the SDK also accepts other answers, such as a web page
        repeat: False for a request that may only be repeated if the service refused it (HTTP 429)
        """
        from huaweicloudsdkcore.retry.backoff_strategy import BackoffStrategies
        from huaweicloudsdkcore.utils.http_utils import sanitize_for_serialization

        def is_repeatable(answer: object, error: Exception | None) -> bool:
            """Return whether to send the request again. The SDK asks after each attempt."""
            status = getattr(error, "status_code", None)
            # None: there was no answer at all
            is_temporary = status in (None, 429) or status >= 500
            return error is not None and (is_temporary if repeat else status == 429)

        invoker = getattr(self._client, f"{call}_invoker")(request)
        invoker.with_retry(is_repeatable, _RETRIES, BackoffStrategies.EQUAL_JITTER)
        try:
            return str(sanitize_for_serialization(invoker.invoke())[table][key])
        except self._errors as error:
            refused: Any = error
            status = getattr(error, "status_code", None)
            text = getattr(error, "error_msg", None) or str(error)
            for secret in self._secrets:  # before the text is shown anywhere
                text = text.replace(secret, "***")
            reason = f"no usable answer from {self._host} ({type(error).__name__}: {text[:500]})"
            if status is not None:
                reason = f"{refused.error_code} {text[:500]} (HTTP {status}, request id {refused.request_id})"
            raise ServiceError(f"{call.replace('_', ' ')}: {reason}", status) from error
