"""`data fetch` and `data upload`: corpora and vocabularies from the internet, and to an object store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import argument, flag, option
from clusterctl.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from clusterctl.downloads.fetch import Result

Endpoint = Annotated[
    str, typer.Option("--endpoint", metavar="URL", help="The object store's URL. Default: $AWS_ENDPOINT_URL.")
]


def fetch(
    sources: list[str] | None = argument(
        "URLs, or names of --list; s3:// and obs:// folders too.", metavar="URL|NAME..."
    ),
    output: Path = option(
        "A folder (as it is, or with / at its end), or a file.",
        "-o",
        "--output",
        default=Path("data"),
        metavar="PATH",
    ),
    digest: str = option(
        "The MD5, SHA-1 or SHA-256 that the file must have.", "--hash", default="", metavar="HEX"
    ),
    proxy: str = option("A proxy. Default: $https_proxy and $http_proxy.", default="", metavar="URL"),
    endpoint: Endpoint = "",
    accept_changed: bool = flag("Accept a file that differs from its first download."),
    list_names: bool = flag("List the names, and whether a hash is known.", "--list", "-l"),
    as_json: options.Json = False,
) -> None:
    """Download corpora and vocabularies. An interrupted download continues; the hash is verified, or recorded at the
    first download of a file without a published hash."""
    from clusterctl.downloads.fetch import check_proxy, check_url
    from clusterctl.downloads.names import NAMES
    from clusterctl.storage.address import is_address

    if list_names:
        return _show_names(as_json)
    if not sources:
        raise UsageError("nothing to fetch is named", f"a URL, or one of {', '.join(NAMES)}")
    for source in sources:
        if source not in NAMES and not is_address(source):
            if "://" not in source:
                hint = did_you_mean(source, list(NAMES)) or "clusterctl data fetch --list"
                raise UsageError(f"no file is called {source!r}", hint)
            check_url(source)
    if digest and len(sources) > 1:
        raise UsageError("--hash is for one file", "fetch the files one by one")
    if proxy:
        check_proxy(proxy)
    results = []
    for source in sources:
        if is_address(source):
            _fetch_folder(source, output, endpoint, as_json)
        else:
            results.append(_fetch_file(source, output, digest, proxy, accept_changed, len(sources) > 1))
    if as_json and results:
        screen.show_json([asdict(result) for result in results])


def _fetch_file(
    source: str, output: Path, digest: str, proxy: str, accept_changed: bool, several: bool
) -> Result:
    from clusterctl import text
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.downloads.fetch import Wanted, fetch, file_name, published_hash
    from clusterctl.downloads.names import NAMES, NamedFile

    named = NAMES.get(source) or NamedFile(source, file_name(source), "")
    is_folder = several or output.is_dir() or not output.suffix
    target = output / named.file if is_folder else output
    expected = digest or named.sha256
    if not expected and named.sums:
        expected = published_hash(named.sums, named.file, proxy)
    with bar("fetch") as drawn:
        wanted = Wanted(named.url, target, expected, proxy, accept_changed)
        result = fetch(wanted, drawn.of(target.name))
    state = "unchanged" if result.unchanged else f"{text.size(result.fetched)} in {result.seconds:.1f} s"
    trust = "verified" if result.pinned else "unpinned: no published hash; recorded in fetched.json"
    screen.log(f"{target}: {text.size(result.bytes)}, {state}, SHA-256 {result.sha256} ({trust})")
    return result


def _show_names(as_json: bool) -> None:
    from clusterctl.cli.views import tables
    from clusterctl.downloads.names import NAMES

    if as_json:
        return screen.show_json({name: asdict(file) for name, file in NAMES.items()})
    rows = [
        [
            name,
            file.text,
            "pinned" if file.sha256 else "published list" if file.sums else "unpinned",
            file.url,
        ]
        for name, file in NAMES.items()
    ]
    screen.show(tables.table(["NAME", "CONTENT", "HASH", "URL"], rows))


def _fetch_folder(source: str, output: Path, endpoint: str, as_json: bool) -> None:
    from clusterctl import text
    from clusterctl.storage.data import fetch_folder

    done = fetch_folder(source, output, endpoint)
    if as_json:
        return screen.show_json({"path": str(output), **asdict(done)})
    trust = "verified" if done.is_listed else "unpinned: the folder has no list of hashes"
    counts = f"{text.plural(done.files, 'file')}, {text.size(done.size)}, {text.size(done.moved)} fetched"
    screen.write(f"{output}: {counts} ({trust})\n")


def upload(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A local folder with data.")],
    address: Annotated[
        str, typer.Argument(metavar="s3://BUCKET/FOLDER", help="Where it goes: s3:// or obs://.")
    ],
    endpoint: Endpoint = "",
    as_json: options.Json = False,
) -> None:
    """Upload a folder to an object store, with a list of its hashes, for `data: s3://...` in a job. An interrupted
    upload continues; the list is written last."""
    from clusterctl import text
    from clusterctl.storage.data import upload_folder

    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", "name a folder with data")
    done = upload_folder(folder, address, endpoint)
    if as_json:
        return screen.show_json({"address": address, "files": len(done.files), "bytes": done.size})
    screen.write(f"{address}: {text.plural(len(done.files), 'file')}, {text.size(done.size)}\n")
