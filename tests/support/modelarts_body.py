"""Check that ModelArts accepts a request to create a job, by the classes of the vendor's SDK and the limits
of its documents."""

import re

import huaweicloudsdkmodelarts.v1 as sdk
from huaweicloudsdkcore.utils.http_utils import sanitize_for_serialization

_ANNOTATIONS = {  # name -> form, of JobMetadata
    "fault-tolerance/job-retry-num": r"[1-9]\d{0,2}",
    "fault-tolerance/pod-retry-num": r"[1-9]\d{0,2}",
    "fault-tolerance/job-unconditional-retry": "true|false",
    "fault-tolerance/hang-retry": "true|false",
}
_NOT_IN_THE_SDK = {"Output": {"prefetch_to_local": bool}}  # the console's "pre-download"
_FOLDER = r"/[a-z0-9][a-z0-9-]{1,61}[a-z0-9]/(?:[^/\s]+/)*"


class Wrong(Exception):
    """The service does not accept the body. The message names the field and the reason."""


def check_model(value, model: str, place: str) -> None:
    """Compare a JSON value with a class of the SDK: no unknown key, and every type as declared."""
    primitive = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
    if model.startswith("list["):
        if not isinstance(value, list):
            raise Wrong(f"{place} is not a list")
        for number, each in enumerate(value):
            check_model(each, model[5:-1], f"{place}[{number}]")
    elif model.startswith("dict("):
        if not isinstance(value, dict):
            raise Wrong(f"{place} is not an object")
        for name, each in value.items():
            check_model(each, model[5:-1].split(", ")[1], f"{place}.{name}")
    elif model in primitive:
        if not isinstance(value, primitive[model]) or (isinstance(value, bool) and model != "bool"):
            raise Wrong(f"{place} is {value!r}, not {model}")
    else:
        declared = getattr(sdk, model)
        types = {declared.attribute_map[name]: kind for name, kind in declared.openapi_types.items()}
        if not isinstance(value, dict):
            raise Wrong(f"{place} is not an object")
        for name, each in value.items():
            extra = _NOT_IN_THE_SDK.get(model, {})
            if name in extra and isinstance(each, extra[name]):
                continue
            if name not in types:
                raise Wrong(f"{place}.{name} is not a member of {model}")
            check_model(each, types[name], f"{place}.{name}")


def _known(body: dict) -> dict:
    """Return the value without the keys that the SDK does not know."""
    outputs = [
        {name: value for name, value in each.items() if name not in _NOT_IN_THE_SDK["Output"]}
        for each in body.get("algorithm", {}).get("outputs", [])
    ]
    if "outputs" not in body.get("algorithm", {}):
        return body
    return body | {"algorithm": body["algorithm"] | {"outputs": outputs}}


def check_job(body) -> None:
    """Check a request to create a job. Raises Wrong."""
    check_model(body, "Job", "body")
    read = sdk.ModelArtsClient()._deserialize(body, "Job")  # as the SDK itself reads a job
    if sanitize_for_serialization(read) != _known(body):
        raise Wrong("body changes when the SDK reads and writes it")

    def need(condition, what: str) -> None:
        if not condition:
            raise Wrong(what)

    def fits(pattern: str, text, what: str) -> None:
        need(isinstance(text, str) and re.fullmatch(pattern, text), f"{what} is {text!r}")

    need(body.get("kind") == "job", "kind is not job")
    metadata, algorithm, spec = (body.get(name, {}) for name in ("metadata", "algorithm", "spec"))
    fits(r"[A-Za-z0-9_-]{1,64}", metadata.get("name"), "metadata.name")
    need(len(metadata.get("description", "")) <= 256, "metadata.description is longer than 256")
    for name, value in metadata.get("annotations", {}).items():
        need(name in _ANNOTATIONS, f"metadata.annotations has {name}")
        fits(_ANNOTATIONS[name], value, f"metadata.annotations.{name}")

    engine = algorithm.get("engine", {})
    preset = {"engine_name", "engine_version"} <= set(engine)
    need(preset != ("image_url" in engine), f"algorithm.engine is neither preset nor custom: {engine}")
    fits(_FOLDER, algorithm.get("code_dir"), "algorithm.code_dir")
    if preset:
        fits(re.escape(algorithm["code_dir"]) + r".+\.py", algorithm.get("boot_file"), "algorithm.boot_file")
        need("command" not in algorithm, "algorithm.command and a preset engine")
    else:
        fits(r".+", algorithm.get("command"), "algorithm.command")
        need("boot_file" not in algorithm, "algorithm.boot_file and a command")
    names = [each.get("name") for each in algorithm.get("parameters", [])]
    for kind, folder in (("inputs", "inputs"), ("outputs", "outputs")):
        for each in algorithm.get(kind, []):
            fits(r"[A-Za-z0-9_-]{1,64}", each.get("name"), f"{kind}.name")
            fits("parameter|env", each.get("access_method"), f"{kind}.access_method")
            fits(
                rf"/home/ma-user/modelarts/{folder}/[A-Za-z0-9_-]+_\d+",
                each.get("local_dir"),
                f"{kind}.local_dir",
            )
            fits(_FOLDER, each.get("remote", {}).get("obs", {}).get("obs_url"), f"{kind}.remote.obs.obs_url")
            names.append(each["name"])
    need(len(set(names)) == len(names), f"names of arguments are there twice: {names}")
    variables = algorithm.get("environments", {})
    need(len(variables) <= 100, f"{len(variables)} environments")
    for name, value in variables.items():
        fits(r"[A-Za-z_][A-Za-z0-9_]{0,8191}", name, "a name in environments")
        need(len(value) <= 4096 and "$" not in value, f"environments.{name}")

    resource = spec.get("resource", {})
    need(resource.get("node_count", 1) >= 1, "spec.resource.node_count")
    need("flavor_id" in resource or "pool_id" in resource, "spec.resource has no flavor and no pool")
    if "log_export_path" in spec:
        fits("obs:/" + _FOLDER, spec["log_export_path"].get("obs_url"), "spec.log_export_path.obs_url")
    if "auto_stop" in spec:
        need(spec["auto_stop"].get("time_unit") == "HOURS", "spec.auto_stop.time_unit")
        need(spec["auto_stop"].get("duration", 0) >= 1, "spec.auto_stop.duration")
    if "schedule_policy" in spec:
        need("pool_id" in resource, "spec.schedule_policy without a dedicated pool")
        need(spec["schedule_policy"].get("priority", 1) in (1, 2, 3), "spec.schedule_policy.priority")
