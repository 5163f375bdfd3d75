"""Runs at each start of the runtime's Python in a sandbox: what `pip` installs there goes to the sandbox's own volume.

The runtime is shared and read-only. With another prefix it is to `pip` what a system's packages are to a virtual environment: they
satisfy requirements, and another version is installed over them instead of in their place. The kernel's driver does the same for itself.
"""

import os
import sys


def open_packages(base=os.environ.get("SANDPOOL_PACKAGES")):
    if not base or "_sandpool_site" not in sys.modules:
        return  # another Python than the runtime's
    import site

    own = f"{base}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    before = (n for n, path in enumerate(sys.path) if path.endswith("/site-packages"))
    sys.path.insert(next(before, len(sys.path)), own)
    if os.path.isdir(own):
        site.addsitedir(own)
    sys.prefix = sys.exec_prefix = base


def note_no_network(argv=sys.orig_argv):
    """`pip` would only say that it found nothing."""
    is_pip = any(os.path.basename(word).startswith("pip") for word in argv[1:3])
    if is_pip and not {"install", "download"}.isdisjoint(argv) and "HTTPS_PROXY" not in os.environ:
        note = "this sandbox has no network, so that only packages that are here as files can be installed; the operator can allow " \
            "more with `network.default` in sandpool.toml, for example \"packages\""
        print(f"NOTE: {note}", file=sys.stderr)


open_packages()
note_no_network()
del open_packages, note_no_network
