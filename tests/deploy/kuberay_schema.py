"""What KubeRay's RayJob and RayCluster (ray.io/v1, v1.6) accept of the fields that rlooper renders, as JSON Schema.

Written by hand from KubeRay's API reference: names, types, what is required, and the enumerations. The custom resource definition
itself repeats all of Kubernetes' pod template (18000 lines); of that only the part that we use is here. Anything else is refused.
"""

from typing import Any

TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITY = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}
LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}


def of(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def each(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


AMOUNTS = {"type": "object", "propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]}, "additionalProperties": QUANTITY}
CONTAINER = of(
    ["name", "image"],
    name=LABEL,
    image=TEXT,
    resources=of([], requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=each(of(["name", "mountPath"], name=LABEL, mountPath=TEXT)),
    envFrom=each(of([], secretRef=of(["name"], name=LABEL))),
    securityContext=of([], allowPrivilegeEscalation=FLAG, runAsNonRoot=FLAG),
)
VOLUME = of(
    ["name"],
    name=LABEL,
    emptyDir=of([], medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
    persistentVolumeClaim=of(["claimName"], claimName=LABEL),
)
TEMPLATE = of(
    ["spec"],
    spec=of(["containers"], containers={**each(CONTAINER), "minItems": 1}, volumes=each(VOLUME), terminationGracePeriodSeconds=COUNT),
)
CLUSTER_SPEC = of(
    ["headGroupSpec"],
    rayVersion=TEXT,
    authOptions=of([], mode={"enum": ["disabled", "token"]}, secretName=LABEL),
    headGroupSpec=of(
        ["template"],
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
        rayStartParams=TEXTS,
        template=TEMPLATE,
    ),
    workerGroupSpecs=each(
        of(
            ["groupName", "maxReplicas", "minReplicas", "template"],
            groupName=LABEL,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)
JOB_SPEC = of(
    [],
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=CLUSTER_SPEC,
)


def schema(kind: str) -> dict[str, Any]:
    """Return the schema of `RayJob` or `RayCluster`."""
    spec = {"RayJob": JOB_SPEC, "RayCluster": CLUSTER_SPEC}[kind]
    metadata = of(["name"], name=LABEL, labels=TEXTS)
    return of(
        ["apiVersion", "kind", "metadata", "spec"], apiVersion={"const": "ray.io/v1"}, kind={"const": kind}, metadata=metadata, spec=spec
    )
