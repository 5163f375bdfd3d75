use std::os::unix::net::UnixListener;

use super::*;

/// Creates a fake root of a machine with systemd: the server's cgroup, the limits of cgroups, and the buses.
fn machine(name: &str, uid: u32, own: &str, limits: &[(&str, &str, &str)]) -> (PathBuf, Result<Manager, Absence>) {
    let root = crate::test_dir(name);
    let top = root.join("sys/fs/cgroup");
    fs::create_dir_all(top.join(&own[1..])).unwrap();
    for (dir, file, text) in limits {
        fs::write(top.join(dir).join(file), text).unwrap();
    }
    for bus in ["run/dbus/system_bus_socket", "run/user/0/bus"] {
        fs::create_dir_all(root.join(bus).parent().unwrap()).unwrap();
        fs::write(root.join(bus), "").unwrap();
    }
    let _ = std::os::unix::fs::symlink("0", root.join(format!("run/user/{uid}")));
    let unified = Unified { own: top.join(&own[1..]), path: own.into(), top };
    let found = Manager::find(&root, &unified, uid);
    (root, found)
}

/// W40, W48: the scope is placed where the limits around the unit apply, and has the unit's limits itself.
#[test]
fn w40_a_scope_takes_the_slice_and_the_limits_of_the_unit_along() {
    let own = "/system.slice/box.slice/a.service/sub";
    let limits = [
        ("system.slice/box.slice/a.service", "memory.max", "262144000\n"),
        ("system.slice/box.slice/a.service", "memory.high", "max\n"),
        ("system.slice/box.slice/a.service", "cpu.max", "150000 100000\n"),
        ("system.slice/box.slice/a.service", "pids.max", "100\n"),
        ("system.slice/box.slice/a.service/sub", "pids.max", "50\n"),
        ("system.slice/box.slice/a.service/sub", "cpu.max", "max 100000\n"),
        ("system.slice/box.slice", "memory.max", "1\n"),
    ];
    let (root, found) = machine("w40s", 0, own, &limits);
    let found = found.unwrap();
    assert_eq!(found.bus, root.join("run/dbus/system_bus_socket"));
    assert_eq!(found.slice.as_deref(), Some("box.slice"));
    let bounds = Bounds { memory: Some(262_144_000), cpu: Some(1_500_000), pids: Some(50), ..Bounds::default() };
    assert_eq!(found.bounds, bounds, "those of the slice hold anyway");
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn w48_only_the_manager_of_the_own_unit_is_asked() {
    let slice = |name, uid, own: &str| {
        let (root, found) = machine(name, uid, own, &[]);
        fs::remove_dir_all(&root).unwrap();
        found.map(|found| {
            (found.bus.strip_prefix(&root).unwrap().display().to_string(), found.slice.unwrap_or_default())
        })
    };
    let user = "/user.slice/user-7.slice";
    let text = |bus: &str, slice: &str| Ok((bus.to_owned(), slice.to_owned()));
    assert_eq!(slice("a", 7, &format!("{user}/session-3.scope")), text("run/user/7/bus", ""));
    let app = format!("{user}/user@7.service/app.slice/app-term.scope");
    assert_eq!(slice("b", 7, &app), text("run/user/7/bus", "app.slice"));
    assert_eq!(slice("c", 0, &app), text("run/dbus/system_bus_socket", "user-7.slice"));
    let refused = slice("d", 7, "/system.slice/a.service").unwrap_err().why;
    assert_eq!(refused, "`a.service` belongs to the system, whose manager takes no orders from this user");
    assert!(slice("e", 7, "/user.slice/user-8.slice/session-1.scope").is_err());
    assert_eq!(slice("f", 0, "/").unwrap_err().why, "the server is in no unit of systemd");
}

/// Reads one call from the stream, as the bus does, and returns its header and body.
fn heard(stream: &mut UnixStream) -> (Vec<u8>, Vec<u8>) {
    let mut fixed = [0; 16];
    stream.read_exact(&mut fixed).unwrap();
    let number = |at: usize| u32::from_ne_bytes(fixed[at..at + 4].try_into().unwrap()) as usize;
    let mut header = vec![0; number(12).next_multiple_of(8)];
    stream.read_exact(&mut header).unwrap();
    let mut body = vec![0; number(4)];
    stream.read_exact(&mut body).unwrap();
    (header, body)
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// A bus that accepts the client, assigns a name, sends a signal that the client does not expect, and answers the
/// second call with an error.
fn refuse(listener: &UnixListener) -> Vec<u8> {
    let (mut stream, _) = listener.accept().unwrap();
    let mut line = [0; 1];
    let mut said = Vec::new();
    while !said.ends_with(b"BEGIN\r\n") {
        stream.read_exact(&mut line).unwrap();
        said.push(line[0]);
        if said.ends_with(b"\r\n") && !said.ends_with(b"BEGIN\r\n") {
            assert!(said.starts_with(b"\0AUTH EXTERNAL 3"), "{said:?}");
            stream.write_all(b"OK 1234deadbeef\r\n").unwrap();
        }
    }
    // Signals can arrive at any time.
    say(&mut stream, 4, 0, "", "unheard");
    heard(&mut stream);
    say(&mut stream, METHOD_RETURN, 1, "", ":1.5");
    let (header, body) = heard(&mut stream);
    assert!(contains(&header, b"StartTransientUnit\0") && contains(&header, b"ssa(sv)a(sa(sv))\0"));
    say(&mut stream, ERROR, 2, "org.freedesktop.DBus.Error.AccessDenied", "Access denied");
    body
}

fn say(stream: &mut UnixStream, kind: u8, reply_to: u32, name: &str, text: &str) {
    let mut body = Encoder::default();
    body.text(text);
    let mut message = Encoder { bytes: vec![ENDIAN, kind, 0, 1] };
    message.u32(body.bytes.len() as u32);
    message.u32(77);
    message.array(8, |fields| {
        if !name.is_empty() {
            fields.bytes.push(ERROR_NAME);
            fields.signature("s");
            fields.text(name);
            fields.align(8);
        }
        if reply_to > 0 {
            fields.bytes.push(REPLY_SERIAL);
            fields.signature("u");
            fields.u32(reply_to);
            fields.align(8);
        }
        fields.bytes.push(SIGNATURE);
        fields.signature("g");
        fields.signature("s");
    });
    message.align(8);
    message.bytes.extend(body.bytes);
    stream.write_all(&message.bytes).unwrap();
}

#[test]
fn w48_what_systemd_refuses_is_told_in_its_own_words() {
    let dir = crate::test_dir("w48");
    let bus = dir.join("bus");
    let listener = UnixListener::bind(&bus).unwrap();
    let server = std::thread::spawn(move || refuse(&listener));
    let bounds = Bounds { memory: Some(0x1122_3344_5566_7788), ..Bounds::default() };
    let manager = Manager { bus: bus.clone(), slice: Some("a.slice".into()), bounds, like: dir.clone() };
    let refused = manager.start_scope("sandpool-x.scope").unwrap_err();
    let expected = format!(
        "systemd gave no scope over `{}`: Access denied (org.freedesktop.DBus.Error.AccessDenied)",
        bus.display()
    );
    assert_eq!(refused, expected);
    let body = server.join().unwrap();
    for part in
        ["sandpool-x.scope\0", "fail\0", "Delegate\0\u{1}b\0", "Slice\0\u{1}s\0", "a.slice\0", "PIDs\0\u{2}au\0"]
    {
        assert!(contains(&body, part.as_bytes()), "{part}");
    }
    assert!(contains(&body, &0x1122_3344_5566_7788_u64.to_ne_bytes()));
    fs::remove_file(&bus).unwrap();
    let gone = manager.answers().unwrap_err();
    assert!(gone.ends_with("No such file or directory (os error 2)"), "{gone}");
    fs::remove_dir_all(dir).unwrap();
}
