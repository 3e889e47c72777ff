"""Explain the errors of an object store in one line that a user can act on."""

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import explain_write

MISSING = ("404", "NoSuchKey", "NotFound")  # reasons of a StoreError: no such object
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY"
_CAUSES = {  # cause: classes of exceptions of the libraries and the network; codes of S3 and OBS
    f"no credentials: {_KEYS}": "NoCredentialsError",
    f"a credential is missing: {_KEYS}": "PartialCredentialsError",
    "the credentials cannot be read": "CredentialRetrievalError ProfileNotFound TokenRetrievalError",
    "the credentials have expired: renew them": (
        "ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken"
    ),
    "the credentials are not accepted": "InvalidSecurity 401",
    "the store does not know the access key": "InvalidAccessKeyId",
    "the secret key does not belong to the access key": "SignatureDoesNotMatch",
    "the clock of this machine is wrong": "RequestTimeTooSkewed",
    "no permission": "AccessDenied AllAccessDisabled Forbidden 403",
    "no such bucket": "NoSuchBucket",
    "no such object": "NoSuchKey NotFound 404",
    "the name of the bucket or of the object is not valid": "ParamValidationError InvalidBucketName",
    "the object was replaced while it was read, or a gateway gives weak ETags: let it not compress": (
        "PreconditionFailed 412 S3DownloadFailedError"
    ),
    "the object is archived: restore it first": "InvalidObjectState",
    "the listing does not end": "PaginationError",
    "the bucket is in another region: set the endpoint of that region": (
        "PermanentRedirect TemporaryRedirect 301 307 RecursionError"  # botocore follows a redirect to itself
    ),
    "the bucket is in another region: set AWS_DEFAULT_REGION": "AuthorizationHeaderMalformed",
    "the network was interrupted while data was sent": "RequestTimeout",
    "the store received other bytes than those that were sent": (
        "BadDigest XAmzContentSHA256Mismatch IncompleteBody"
    ),
    "the store is too busy": "SlowDown ServiceUnavailable Throttling ThrottlingException 429 503",
    "{endpoint} has no certificate that this machine trusts (AWS_CA_BUNDLE=FILE names another)": "SSLError",
    "{endpoint} cannot be reached": "EndpointConnectionError ProxyConnectionError",
    "{endpoint} does not answer": "ConnectTimeoutError",
    "{endpoint} stopped answering": "ReadTimeoutError TimeoutError",
    "{endpoint} did not end the answer": (
        "BotoCoreError HTTPError HTTPException ConnectionError IncompleteReadError"
    ),
}
_NETWORK = [cause for cause in _CAUSES if cause.startswith("{endpoint}") and "certificate" not in cause]
_LATER = ("the store is too busy", "the network was interrupted while data was sent", *_NETWORK)
_CAUSE_OF = {name: cause for cause, names in _CAUSES.items() for name in names.split()}
_FORBIDDEN = (403, 405, 409, 501)  # answers to a DELETE in a bucket that keeps its objects
# codes that another attempt may cure
_PASSING = {
    "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "OperationAborted",
    "ConditionalRequestConflict", "NoSuchUpload",  # the answer to an earlier attempt was lost
}  # fmt: skip


class StoreError(BadInput):
    """A request to an object store failed. The message names the bucket, the key and the cause.

    reason: the code of the store ("NoSuchBucket"), the class of the exception ("ReadTimeoutError"),
    "damaged", "replaced", "interrupted" or "disk". again: another attempt may succeed at once. later: some
    minutes later: the store is busy, or the network is interrupted. forbidden: the store does not allow such
    a request: by its permissions, or because it keeps all objects.
    """

    def __init__(
        self,
        message: str,
        reason: str = "",
        again: bool = False,
        later: bool = False,
        forbidden: bool = False,
    ):
        super().__init__(message)
        self.reason = reason
        self.again = again
        self.later = later or again
        self.forbidden = forbidden


class Damaged(Exception):
    """An answer of a store cannot be right. The message is the cause for the user."""


def explain(error: Exception, url: str, endpoint: str) -> StoreError | None:
    """Return the StoreError for an exception of boto3, the network or this package; None for one of the disk.
    The text of the server is not repeated: it may quote the request.

    url: the address of the object for the message. endpoint: the name of the server.
    """
    error = getattr(error, "last_exception", error)  # s3transfer: the attempts are used up
    if isinstance(error, Damaged):
        return StoreError(f"{url}: {error}", "damaged", again=True)
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore's ClientError
        return _explain_answer(answer, url)
    # the class of the error first, then those above it
    name = type(error).__name__
    for kind in type(error).__mro__:
        if cause := _CAUSE_OF.get(kind.__name__):
            return StoreError(
                f"{url}: {cause.format(endpoint=endpoint)} ({name})", name, later=cause in _LATER
            )
    if isinstance(error, OSError):
        return None
    # for example an invalid date, or an answer without a field
    return StoreError(f"{url}: the answer cannot be read ({name})", "damaged")


def _explain_answer(answer: dict, url: str) -> StoreError:
    """Return the StoreError for an answer of the server that refuses a request."""
    code = str(answer.get("Error", {}).get("Code") or "unknown")
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    cause = _CAUSE_OF.get(code) or _CAUSE_OF.get(str(status))
    if code == "400":  # the answer to HEAD has no text, and boto3 gives its status as the code
        cause = "the store gives no reason; perhaps the credentials have expired: renew them"
    # the code is text of the server: no more of it is shown than a word
    if not code.isalnum() or len(code) > 60:
        code = "unknown"
    again = code in _PASSING
    later = cause in _LATER or (status >= 500 and status != 501)
    forbidden = cause == "no permission" or (not cause and status in _FORBIDDEN and not again)
    cause = cause or f"the store {'failed' if status >= 500 else 'refused'} (status {status})"
    return StoreError(f"{url}: {cause} ({code})", code, again, later, forbidden)


def of_the_disk(error: OSError, path: str) -> StoreError:
    """Return the error for a file of this node that cannot be read or written, with the free space."""
    return StoreError(f"{printable(path)}: {explain_write(error, path)}", "disk")
