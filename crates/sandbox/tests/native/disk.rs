//! A small disk and volumes that together are larger than it (rows W23 and W50).

use sandbox::native::KeepFree;

use super::*;

/// The disk, what stays free of it, and each volume: three of them do not fit.
const DISK: &str = "size=160m";
const KEEP: u64 = 32 << 20;
const VOLUME: u64 = 64 << 20;
/// What has to be free above the floor for a new sandbox.
const NEWCOMER: u64 = 16 << 20;

/// Writes files of 1 MB and says, for each that was written without an error, whether the disk has it. Read with `O_DIRECT`: what
/// the cache says is not asked.
const WRITE: &str = "for i in $(seq 1 12); do \
    rm -f kept-$i; text=\"$$ number $i\"; \
    yes \"$text\" | head -c 1048576 > kept-$i && sync || { rm -f kept-$i; echo refused; continue; }; \
    want=$(yes \"$text\" | head -c 1048576 | md5sum); \
    got=$(dd if=kept-$i iflag=direct bs=1M status=none | md5sum); \
    [ \"$got\" = \"$want\" ] && echo good || echo LOST; \
    done 2>/dev/null";

fn disk(place: &Place) -> Mounted {
    let state = place.0.join("state");
    let mounted = Mounted::new("tmpfs", &state, 0);
    #[allow(clippy::disallowed_methods, reason = "the test makes its own small disk")]
    let resized = Command::new("mount").args(["-o", &format!("remount,{DISK}")]).arg(&state).status().unwrap();
    assert!(resized.success());
    fs::set_permissions(&state, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    mounted
}

async fn started(place: &Place) -> Native {
    let config = NativeConfig { keep_free: KeepFree(Some(KEEP)), spares: 0, ..config(&place.0) };
    Native::start(spawn_launcher_from(&helper()).unwrap(), config).await.unwrap().0
}

fn free(place: &Place) -> u64 {
    let found = rustix::fs::statvfs(place.0.join("state")).unwrap();
    found.f_bavail * found.f_frsize
}

fn count(said: &str, word: &str) -> usize {
    said.lines().filter(|line| *line == word).count()
}

#[tokio::test]
async fn w23_a_tenant_that_fills_the_disk_costs_nobody_a_byte_that_was_written() {
    if !root() {
        return;
    }
    let place = Place::new("disk");
    let mounted = disk(&place);
    let native = started(&place).await;
    let large = SandboxSpec { limits: Limits { disk_bytes: VOLUME, ..LIMITS }, ..spec() };
    let victim = native.create(&large).await.unwrap();
    let keeping = SandboxSpec { kept: Some(KeptVolume { bytes: VOLUME, ..kept('a') }), ..large.clone() };
    let keeper = native.create(&keeping).await.unwrap();
    let attackers = [native.create(&large).await.unwrap(), native.create(&large).await.unwrap()];

    // Blocks ahead of writing would be in no image: a library writes zeros instead, which are counted.
    assert!(sh(&*victim, "fallocate -l 1M ahead 2>&1 && ls ahead").await.contains("not supported"));

    let in_data = format!("cd /data; {WRITE}");
    assert_eq!(count(&sh(&*victim, WRITE).await, "good"), 12);
    assert_eq!(count(&sh(&*keeper, &in_data).await, "good"), 12);

    let fill = "dd if=/dev/zero of=/workspace/big bs=1M 2>&1; sync";
    let (one, two, beside, kept_beside) =
        tokio::join!(sh(&*attackers[0], fill), sh(&*attackers[1], fill), sh(&*victim, WRITE), sh(&*keeper, &in_data));
    assert!(one.contains("No space left") && two.contains("No space left"), "{one}\n{two}");
    let (said, kept_said) = tokio::join!(sh(&*victim, WRITE), sh(&*keeper, &in_data));
    for said in [beside, kept_beside, said, kept_said] {
        assert_eq!(count(&said, "good") + count(&said, "refused"), 12, "{said}");
    }
    // What the attackers were told is true as well.
    for attacker in &attackers {
        let read =
            "s=$(stat -c %s /workspace/big); n=$(dd if=/workspace/big bs=1M 2>/dev/null | wc -c); echo $((s - n))";
        assert_eq!(sh(&**attacker, read).await, "0\n");
    }
    // The attackers go on until no newcomer fits above the floor. How fast they get there depends on how often the launcher looks.
    let more = "for i in $(seq 1 40); do \
        dd if=/dev/zero of=more-$(date +%s%N) bs=256k count=4 2>/dev/null || sleep 0.05; done; sync";
    let until = Instant::now() + Duration::from_secs(60);
    while free(&place) >= KEEP + NEWCOMER {
        assert!(Instant::now() < until, "{} bytes are still free", free(&place));
        tokio::join!(sh(&*attackers[0], more), sh(&*attackers[1], more));
    }
    assert!(free(&place) + (4 << 20) > KEEP, "{} bytes are free", free(&place));
    let refused = native.create(&large).await.err();
    let Some(BackendError::NoSpace(message)) = refused else { panic!("{refused:?}, {} bytes are free", free(&place)) };
    assert!(
        message.starts_with("the server's disk is full: ") && message.ends_with("32 MB have to stay free"),
        "{message}"
    );

    // Files that code deletes make room for others, whose sandboxes go on.
    sh(&*attackers[0], "rm -f /workspace/*; sync").await;
    let until = Instant::now() + Duration::from_secs(60);
    while !sh(&*victim, "rm -f kept-*; dd if=/dev/zero of=after bs=1M count=8 2>&1 && sync && echo WRITTEN")
        .await
        .contains("WRITTEN")
    {
        assert!(Instant::now() < until, "no room although {} bytes are free", free(&place));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let [one, two] = attackers;
    one.destroy().await.unwrap();
    two.destroy().await.unwrap();
    let another = native.create(&large).await.unwrap();
    assert!(!sh(&*another, WRITE).await.contains("LOST"));
    for sandbox in [victim, keeper, another] {
        sandbox.destroy().await.unwrap();
    }
    native.shutdown().await;
    drop(mounted);
}

/// W50: the tables of 100,000 inodes are 25.6 MB of holes in an image. Code takes them without taking a free block.
#[tokio::test]
async fn w50_files_without_content_do_not_take_the_rest_of_a_full_disk() {
    if !root() {
        return;
    }
    let place = Place::new("tables");
    let mounted = disk(&place);
    let native = started(&place).await;
    let limits = Limits { disk_bytes: VOLUME, disk_inodes: 100_000, ..LIMITS };
    let many = SandboxSpec { limits, ..spec() };
    let mut attackers = Vec::new();
    for _ in 0..3 {
        attackers.push(native.create(&many).await.unwrap());
    }
    // Each directory has one block already, in which there is room for the names.
    let fill =
        "mkdir -p $(seq 1 380) && dd if=/dev/zero of=big bs=1M 2>&1; sync; dd if=/dev/zero of=more bs=4k 2>&1; sync";
    for _ in 0..2 {
        for attacker in &attackers {
            let said = sh(&**attacker, fill).await;
            assert!(said.contains("No space left"), "{said}");
        }
        // The others learn late what one of them did not use.
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    let refused = native.create(&many).await.err();
    assert!(
        matches!(&refused, Some(BackendError::NoSpace(message)) if message.starts_with("the server's disk is full: ")),
        "{refused:?}"
    );
    for attacker in &attackers {
        let files =
            "for d in $(seq 1 380); do (cd $d && touch $(seq 1 260)) 2>/dev/null; done; sync; find . -type f | wc -l";
        let said = sh(&**attacker, files).await;
        assert!(said.lines().last().is_some_and(|count| count.parse::<u32>().unwrap() > 90_000), "{said}");
    }
    assert!(free(&place) + (4 << 20) > KEEP / 2, "{} bytes are free", free(&place));
    for attacker in attackers {
        attacker.destroy().await.unwrap();
    }
    native.shutdown().await;
    drop(mounted);
}
