"""The scenario's [engine] as a record, and what only its model's files can tell.

A scenario for nodes elsewhere is planned and simulated where neither model nor interpreter is, so
those are looked at by ``check_model``, which a live run asks on the machine that has them.
"""

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from harness.architecture import Architecture
from harness.core import Instance, ScenarioError
from harness.datafile import nearest, printable, read_text_file
from harness.deployment import Deployment
from harness.engine.reference.choice import chosen_model
from harness.engine.sglang.command import reserved_flag
from harness.engine.sglang.versions import unsupported
from harness.engine_settings import Attached, Engine, EngineRole, Reference, Sglang, SglangRole
from harness.model_config import read_model_config
from harness.model_families import FAMILIES
from harness.resolution import missing, wrong
from harness.scenario_tables.engines import EngineRoleTable, EngineTable, Requirement

#: Keys of [engine] that only one kind of engine has.
_OF_REFERENCE = frozenset({"compute", "seed", "dtype", "threads", "prefill_slots"})
_OF_BOTH = frozenset(
    {"kind", "model_path", "device", "chunked_prefill_tokens", "context_tokens", "ready_timeout"}
)
_OF_SGLANG = frozenset(EngineTable.model_fields) - _OF_REFERENCE - _OF_BOTH
#: Of a prefill of the reference engine, where the scenario does not say.
_CHUNK_TOKENS = 2048
ROLES: tuple[EngineRole, ...] = ("prfaas", "prefill", "decode")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|(^|_)KEY(_|$)", re.IGNORECASE)


def resolve_engine(
    table: EngineTable,
    where: str,
    folder: Path,
    architecture: Architecture,
    deployments: dict[str, Deployment],
) -> Engine:
    """Paths are relative to ``folder``. ScenarioError names the key that is wrong or missing."""
    _check_keys(table, where)
    if table.kind == "reference":
        return Engine("reference", None, _reference(table, where, folder, architecture))
    if table.kind == "emulated":
        return Engine("emulated", None)  # said outright, it rehearses what is for real ones
    instances = {i.name: i for one in deployments.values() for i in one.instances()}
    attach = _attached(table, where, instances)
    if table.model_path is None and len(attach) < len(instances):
        first = next(name for name in instances if name not in attach)
        why = f"{first} has to be launched; name the folder of the model, or attach to a server"
        raise missing("engine.model_path", where, why)
    _check_device(table, where)
    requires = _requirements(table, where, architecture)
    return Engine(
        "sglang",
        Sglang(
            model_path=None if table.model_path is None else folder / table.model_path,
            python=_python(table.python, folder),
            version=table.version,
            requires=requires,
            device=table.device,
            transfer_backend=table.transfer_backend,
            transfer_protocol=table.transfer_protocol,
            page_size=table.page_size,
            chunked_prefill_tokens=table.chunked_prefill_tokens,
            load_format=table.load_format,
            mem_fraction=table.mem_fraction,
            max_total_tokens=table.max_total_tokens,
            context_tokens=table.context_tokens,
            max_running_requests=table.max_running_requests,
            ready_timeout_s=table.ready_timeout,
            roles={role: _role(table, role, where) for role in ROLES},
            attach=attach,
        ),
    )


def _check_keys(table: EngineTable, where: str) -> None:
    """Refuse keys that the kind of engine does not have. An emulated engine that is asked for by
    its kind may have those of others: it rehearses what is written for them."""
    if table.kind == "emulated":
        if "kind" not in table.model_fields_set and table.model_fields_set:
            given = next(key for key in type(table).model_fields if key in table.model_fields_set)
            why = (
                'the emulated engine has no such thing; set engine.kind = "sglang" for real '
                'servers, "reference" for a model in torch'
            )
            raise wrong(f"engine.{given}", where, why)
        return
    others = _OF_REFERENCE if table.kind == "sglang" else _OF_SGLANG
    for key in type(table).model_fields:
        if key in table.model_fields_set and key in others:
            why = f'an engine of kind = "{table.kind}" has no such thing; remove it'
            raise wrong(f"engine.{key}", where, why)


def _reference(
    table: EngineTable, where: str, folder: Path, architecture: Architecture
) -> Reference:
    given = [key for key in ("compute", "model_path") if getattr(table, key) is not None]
    if len(given) != 1:
        why = "give it or engine.model_path, one of the two: they say what is computed"
        raise (wrong if given else missing)("engine.compute", where, why)
    found = Reference(
        compute=None if table.compute is None else str((folder / table.compute).absolute()),
        model_path=None
        if table.model_path is None
        else str((folder / table.model_path).absolute()),
        seed=table.seed,
        dtype=table.dtype,
        device=table.device,
        threads=table.threads,
        chunk_tokens=table.chunked_prefill_tokens or _CHUNK_TOKENS,
        prefill_slots=table.prefill_slots,
        context_tokens=table.context_tokens,
        ready_timeout_s=table.ready_timeout,
    )
    try:
        chosen_model(found, architecture)
    except ScenarioError as error:
        raise wrong(f"engine.{given[0]}", where, str(error).removesuffix(".")) from error
    read = Path(found.compute or f"{found.model_path}/config.json")
    return replace(found, model_sha256=hashlib.sha256(read.read_bytes()).hexdigest())


def check_model(engine: Engine, architecture: Architecture, where: str) -> str:
    """Whether the model's folder is of the scenario's architecture, as a sentence for the record.

    ScenarioError where the folder is missing, or where its config.json gives other KV.
    """
    if engine.sglang is None or engine.sglang.model_path is None:
        return "no server is launched, so no model files were looked at"
    path = engine.sglang.model_path
    if not (path / "config.json").is_file():
        what = "holds no config.json" if path.is_dir() else "is not there"
        why = f"the model {printable(str(path))} {what}; give the folder that has its weights"
        raise wrong("engine.model_path", where, why)
    family = _family(path / "config.json")
    if family is not None and family not in FAMILIES:
        return f"the model was not compared with the architecture: {family} is not known here"
    try:
        found = read_model_config(path, architecture.kv_dtype)
    except ScenarioError as error:
        raise wrong("engine.model_path", where, str(error).removesuffix(".")) from error
    for tokens in (1, 1000, 100_000):
        ours, theirs = architecture.kv_bytes(tokens), found.kv_bytes(tokens)
        if ours != theirs:
            why = (
                f"the model {printable(str(path))} has {theirs} bytes of KV at {tokens} tokens, "
                f"model.architecture ({architecture.path}) says {ours}; write the architecture "
                "file by prfaas model inspect"
            )
            raise wrong("engine.model_path", where, why)
    return f"the model's config.json gives the KV bytes of the architecture {architecture.name}"


def _family(path: Path) -> str | None:
    """The first name in ``architectures``; None where the file has none, which its reader tells."""
    try:
        names = json.loads(read_text_file(path, "model config")).get("architectures")
    except (AttributeError, ValueError, RecursionError):
        return None
    first = names[0] if isinstance(names, list) and names else None
    return printable(first) if isinstance(first, str) else None


def _attached(
    table: EngineTable, where: str, instances: dict[str, Instance]
) -> dict[str, Attached]:
    for name, one in table.attach.items():
        key = f"engine.attach.{printable(name)}"
        if name not in instances:
            near = nearest(name, list(instances))
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(instances)}"
            raise wrong(key, where, f"no deployment has such an instance ({hint})")
        prefills = instances[name].role == "prefill"
        if prefills and one.bootstrap is None:
            why = "decode servers fetch KV there from a prefill server"
            raise missing(f"{key}.bootstrap", where, why)
        if not prefills and one.bootstrap is not None:
            why = "a decode server has no bootstrap server; remove it"
            raise wrong(f"{key}.bootstrap", where, why)
    return {
        name: Attached(one.url.rstrip("/"), one.bootstrap) for name, one in table.attach.items()
    }


def _check_device(table: EngineTable, where: str) -> None:
    tables = {"engine": table} | {f"engine.{role}": getattr(table, role) for role in ROLES}
    for name, one in tables.items():
        if one.ib_device is not None and table.transfer_protocol != "rdma":
            why = 'it is of RDMA; set engine.transfer_protocol = "rdma", or remove it'
            raise wrong(f"{name}.ib_device", where, why)
        if table.device == "cpu" and getattr(one, "base_gpu", None) is not None:
            raise wrong(f"{name}.base_gpu", where, 'engine.device = "cpu" has no GPU')
    if table.device == "cpu" and table.transfer_protocol == "rdma":
        why = 'servers without a GPU move KV by TCP here; set "tcp"'
        raise wrong("engine.transfer_protocol", where, why)


def _requirements(
    table: EngineTable, where: str, architecture: Architecture
) -> tuple[Requirement, ...]:
    """What is asked for and what the model needs to be moved whole."""
    layers = architecture.layers
    has: dict[Requirement, bool] = {
        "hybrid_state": any(layer.fixed_bytes for layer in layers),
        "sliding_window": any(layer.window_bytes_per_token for layer in layers),
    }
    for need in table.requires:
        if not has.get(need, True):
            kind = "recurrent state" if need == "hybrid_state" else "sliding window"
            why = f"{need!r} is asked for, but no layer of {architecture.name} has a {kind}"
            raise wrong("engine.requires", where, why)
    implied: list[Requirement] = ["pd", *(need for need, there in has.items() if there)]
    requires = tuple(dict.fromkeys([*table.requires, *implied]))
    if table.version is not None and (reason := unsupported(table.version, requires)):
        raise wrong("engine.version", where, reason)
    return requires


def _role(table: EngineTable, role: EngineRole, where: str) -> SglangRole:
    own: EngineRoleTable = getattr(table, role)
    for key, flags, env in (
        ("engine", table.extra_flags, table.env),
        (f"engine.{role}", own.extra_flags, own.env),
    ):
        for flag in flags:
            if instead := reserved_flag(flag):
                why = f"{flag!r} is for the launcher to give; {instead}"
                raise wrong(f"{key}.extra_flags", where, why)
        if secret := next(filter(_SECRET.search, env), None):
            why = "it would be recorded with the run; export it before the run instead"
            raise wrong(f"{key}.env.{secret}", where, why)
    return SglangRole(
        tp=own.tp or table.tp,
        dp=own.dp or table.dp,
        ep=own.ep or table.ep,
        base_gpu=own.base_gpu,
        ib_device=own.ib_device or table.ib_device,
        extra_flags=(*table.extra_flags, *own.extra_flags),
        env=table.env | own.env,
    )


def _python(given: str | None, folder: Path) -> str | None:
    """A name is for PATH to find, a path is relative to the scenario file."""
    return str(folder / given) if given is not None and "/" in given else given
