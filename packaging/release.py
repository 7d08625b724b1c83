"""Write the recipes of a release: the addresses and the checksum are known only then."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
RECIPES = ("conda/recipe.yaml", "spack/package.py", "easybuild/*.eb")


def main(arguments: list[str] | None = None) -> None:
    """Replace the placeholders of each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path, help="the source distribution that was published")
    parser.add_argument("--repository", required=True, help="URL of the repository")
    parser.add_argument("--sdist-url", required=True, help="URL of the source distribution")
    parser.add_argument("--out", type=Path, default=FOLDER.parent / "build" / "recipes")
    options = parser.parse_args(arguments)
    values = {
        "@REPOSITORY@": options.repository,
        "@SDIST_URL@": options.sdist_url,
        "@SDIST_SHA256@": hashlib.sha256(options.sdist.read_bytes()).hexdigest(),
    }
    for recipe in (path for pattern in RECIPES for path in FOLDER.glob(pattern)):
        text = recipe.read_text()
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        path = options.out / recipe.relative_to(FOLDER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
