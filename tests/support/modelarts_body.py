"""Check that ModelArts accepts a request to create a job, by the classes of the vendor's SDK and the limits
of its documents."""

import re

_FOLDER = r"/[a-z0-9][a-z0-9-]{1,61}[a-z0-9]/(?:[^/\s]+/)*"
_CHANNEL = {"name": r"[A-Za-z0-9_-]{1,64}", "access_method": "parameter|env", "remote.obs.obs_url": _FOLDER}
_FORMS = {  # place of a value -> its form
    "kind": "job",
    "metadata.name": r"[A-Za-z0-9_-]{1,64}",
    "metadata.description": r".{,256}",
    "metadata.annotations.fault-tolerance/job-retry-num": r"[1-9]\d{0,2}",
    "metadata.annotations.fault-tolerance/pod-retry-num": r"[1-9]\d{0,2}",
    "metadata.annotations.fault-tolerance/job-unconditional-retry": "true|false",
    "metadata.annotations.fault-tolerance/hang-retry": "true|false",
    "metadata.annotations.fault-tolerance/hccl_op_retry": "true|false",
    "algorithm.code_dir": _FOLDER,
    "algorithm.environments.*": r"[^$]{,4096}",
    **{f"algorithm.{kind}.{name}": form for kind in ("inputs", "outputs") for name, form in _CHANNEL.items()},
    "algorithm.inputs.local_dir": r"/home/ma-user/modelarts/inputs/[A-Za-z0-9_-]+_\d+",
    "algorithm.outputs.local_dir": r"/home/ma-user/modelarts/outputs/[A-Za-z0-9_-]+_\d+",
    "spec.resource.node_count": r"[1-9]\d*",
    "spec.log_export_path.obs_url": f"obs:/{_FOLDER}",
    "spec.auto_stop.time_unit": "HOURS",
    "spec.auto_stop.duration": r"[1-9]\d*",
    "spec.schedule_policy.priority": "[123]",
}
_PRIMITIVE = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}


class Wrong(Exception):
    """The service does not accept the body. The message names the field and the reason."""


def check_model(value, model: str, place: str = "body") -> list[tuple[str, object]]:
    """Compare a JSON value with a class of the SDK: no unknown key, and every type as declared. Return the
    values with their places."""
    import huaweicloudsdkmodelarts.v1 as sdk  # seconds, which other tests need not wait

    leaves = []
    if model.startswith("list[") and isinstance(value, list):
        for each in value:
            leaves += check_model(each, model[5:-1], place)
    elif model.startswith("dict(") and isinstance(value, dict):
        for name, each in value.items():
            leaves += check_model(each, model[5:-1].split(", ")[1], f"{place}.{name}")
    elif model in _PRIMITIVE:
        if not isinstance(value, _PRIMITIVE[model]) or (isinstance(value, bool) and model != "bool"):
            raise Wrong(f"{place} is {value!r}, not {model}")
        leaves.append((place.removeprefix("body."), value))
    elif hasattr(sdk, model) and isinstance(value, dict):
        declared = getattr(sdk, model)
        types = {declared.attribute_map[name]: kind for name, kind in declared.openapi_types.items()}
        if model == "Output":
            types["prefetch_to_local"] = "bool"  # the console's "pre-download", which the SDK lacks
        for name, each in value.items():
            if name not in types:
                raise Wrong(f"{place}.{name} is not a member of {model}")
            leaves += check_model(each, types[name], f"{place}.{name}")
    else:
        raise Wrong(f"{place} is {value!r}, not {model}")
    return leaves


def check_job(body) -> None:
    """Check a request to create a job. Raises Wrong."""
    for place, value in check_model(body, "Job"):
        form = _FORMS.get(place, _FORMS.get(f"{place.rpartition('.')[0]}.*"))
        if form and not re.fullmatch(form, str(value)):
            raise Wrong(f"{place} is {value!r}")
        if form is None and place.startswith("metadata.annotations."):
            raise Wrong(f"{place} is unknown")
    algorithm, resource = body["algorithm"], body["spec"]["resource"]
    if {"engine_name", "engine_version"} <= set(algorithm["engine"]):
        is_valid = re.fullmatch(re.escape(algorithm["code_dir"]) + r".+\.py", algorithm["boot_file"])
        is_valid = is_valid and "command" not in algorithm
    else:
        is_valid = {"command"} == {"command", "boot_file"} & {*algorithm} and algorithm["engine"]["image_url"]
    names = [each["name"] for kind in ("parameters", "inputs", "outputs") for each in algorithm[kind]]
    for reason, is_wrong in (
        ("neither a preset nor a custom engine", not is_valid),
        ("names of arguments are there twice", len(set(names)) < len(names)),
        ("more than 100 environments", len(algorithm["environments"]) > 100),
        ("no flavor and no pool", not {"flavor_id", "pool_id"} & set(resource)),
        ("a schedule without a pool", "schedule_policy" in body["spec"] and "pool_id" not in resource),
    ):
        if is_wrong:
            raise Wrong(reason)
