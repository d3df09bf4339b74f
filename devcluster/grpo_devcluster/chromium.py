"""A headless Chromium of Debian's packages, unpacked into the cache: no root, nothing is installed."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from grpo_devcluster.gpu_node.debian import download, missing_libraries
from grpo_devcluster.paths import CACHE, content_key
from grpo_devcluster.stages import StageError, run

PACKAGES = (
    *("chromium-headless-shell", "chromium-common", "fonts-dejavu-core"),
    *("libasound2", "libatk1.0-0", "libatspi2.0-0", "libdav1d6", "libdbus-1-3", "libdouble-conversion3"),
    *("libexpat1", "libflac12", "libfontconfig1", "libfreetype6", "libgbm1", "libgcc-s1", "libstdc++6"),
    *("libglib2.0-0", "libharfbuzz-subset0", "libharfbuzz0b", "libjpeg62-turbo", "liblcms2-2", "libminizip1"),
    *(
        "libnspr4",
        "libnss3",
        "libopenh264-7",
        "libopenjp2-7",
        "libopus0",
        "libpulse0",
        "libudev1",
        "libx11-6",
    ),
    *("libxcb1", "libxcomposite1", "libxdamage1", "libxext6", "libxfixes3", "libxkbcommon0", "libxnvctrl0"),
    *("libxrandr2", "libzstd1", "zlib1g", "libpcre2-8-0", "libffi8", "libmount1", "libblkid1", "libselinux1"),
    *("libsystemd0", "libcap2", "libgcrypt20", "libgpg-error0", "liblz4-1", "liblzma5", "libxrender1"),
    *("libxi6", "libxau6", "libxdmcp6", "libbsd0", "libmd0", "libpng16-16", "libbrotli1", "libgraphite2-3"),
    *("libdrm2", "libwayland-server0", "libsndfile1", "libasyncns0", "libogg0", "libvorbis0a"),
    *("libvorbisenc2", "libmp3lame0", "libmpg123-0", "libx11-xcb1", "libxtst6", "libbz2-1.0", "libsqlite3-0"),
)
_LIBRARIES = (
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/pulseaudio",
)
_REMEDY = "Remove the file, then run the command again."
_FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{tree}/usr/share/fonts</dir><cachedir>{tree}/fonts</cachedir></fontconfig>
"""


def chromium() -> tuple[Path, dict[str, str]]:
    """Return the program and its environment. Raises StageError when Debian's packages cannot be had."""
    packages = download(PACKAGES)
    tree = CACHE / f"chromium-{content_key(_FONTS.encode(), *(file.name.encode() for file in packages))}"
    if not tree.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            _unpack(packages, Path(draft) / "tree")
            (Path(draft) / "tree" / "fonts.conf").write_text(_FONTS.format(tree=tree))
            (Path(draft) / "tree").rename(tree)
    libraries = os.pathsep.join(str(tree / folder) for folder in _LIBRARIES)
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(tree / "fonts.conf")}
    return tree / "usr/lib/chromium/chromium-headless-shell", environment


def _unpack(packages: Iterable[Path], tree: Path) -> None:
    for package in packages:
        run(["dpkg-deb", "--extract", package, tree], step=f"unpacking {package.name}", remedy=_REMEDY)
    missing = missing_libraries(tree, glibc=True)
    if missing:
        raise StageError(f"the tree of Chromium lacks {missing}: name the packages with them")
