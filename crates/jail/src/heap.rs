//! What the allocator of this process does with large blocks.

/// Blocks of at least this size are mapped each on its own.
const LARGE: libc::c_int = 512 << 10;

/// So much may be free at the end of the heap before it is given back.
const LOOSE: libc::c_int = 4 << 20;

/// From here on large blocks return to the system as soon as they are freed. By itself glibc raises the size from which it maps
/// blocks on their own to that of the largest one freed so far (up to 32 MB), and keeps those below it in heaps that can only
/// shrink at their end: what a burst of large requests took would stay with the process.
/// Smaller blocks do so with [`return_free_pages`].
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LOOSE)] {
        // SAFETY: takes two numbers, touches no memory of ours, and locks the allocator while it changes its parameters.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives whole pages that are free inside the heaps back to the system.
pub fn return_free_pages() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a number, and locks each heap of the allocator while it looks through it.
    unsafe {
        libc::malloc_trim(0)
    };
}
