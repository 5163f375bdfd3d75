"""Looks at every process of the sandbox as often as it can, and says which one is not like itself."""

import os

ALIKE = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters")


def read(pid, name):
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read()
    except OSError:
        return ""


def look(pid):
    status = dict(line.split(":", 1) for line in read(pid, "status").splitlines())
    interfaces = [line.split(":")[0].strip() for line in read(pid, "net/dev").splitlines()[2:]]
    maps = " ".join((read(pid, "uid_map") + read(pid, "gid_map")).split())
    found = {
        "mountinfo": read(pid, "mountinfo"),
        # The browser's part lies beside the code's.
        "cgroup": read(pid, "cgroup").replace("/../browser", "/"),
        "interfaces": interfaces,
        "maps": maps,
    }
    found.update({name: status.get(name, "").strip() for name in ALIKE})
    # One that ends while it is looked at shows less and less of itself.
    whole = status and "Z" not in status["State"] and "X" not in status["State"] and found["mountinfo"] and interfaces
    return found if whole else None


own = look("self")
seen, strangers = set(), {}
open("/workspace/begun", "w").close()
while not os.path.exists("/workspace/stop"):
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or pid == "1" or int(pid) == os.getpid():
            continue
        found = look(pid)
        if found is None:
            continue
        seen.add(pid)
        for name, value in found.items():
            # Of one that has ended meanwhile there is nothing left to read.
            if value != own[name] and value:
                strangers[name] = value
print("seen", len(seen) >= 30, flush=True)
for name, value in sorted(strangers.items()):
    print("stranger", name, str(value)[:200], flush=True)
