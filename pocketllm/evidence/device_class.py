"""The device class that a proof or a timing belongs to: the device, and the backend where it is not the device's own.

`cpu` is the native backend of that name on the CPU, `cpu-reference` the reference backend there: what one of them did
says nothing about the other.
"""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown"


def device_class(plan: Mapping[str, Any]) -> str:
    """The class of an engine plan; `unknown` for a plan that names no device, as a peer's has none.

    >>> device_class({"device": "cpu", "backend": "cpu"}), device_class({"device": "cpu", "backend": "reference"})
    ('cpu', 'cpu-reference')
    """
    device, backend = plan.get("device"), plan.get("backend")
    if not device:
        return UNKNOWN
    return str(device) if backend in (None, device) else f"{device}-{backend}"


def recorded_device_class(document: Mapping[str, Any]) -> str:
    """The class of a run document, also of one written when the class was the device alone.

    >>> recorded_device_class({"device_class": "cpu", "plan": {"device": "cpu", "backend": "reference"}})
    'cpu-reference'
    """
    plan = document.get("plan")
    told = str(document.get("device_class"))
    return device_class(plan) if isinstance(plan, Mapping) and plan.get("device") == told else told
