//! This module tunes how the allocator of this process returns memory to the system.

/// Minimum size of a block that gets a separate mapping.
const LARGE: libc::c_int = 512 << 10;

/// Maximum number of free bytes at the end of the heap before they are returned to the system.
const LOOSE: libc::c_int = 4 << 20;

/// Makes the allocator return large blocks to the system as soon as they are freed. By default glibc raises the size
/// from which it maps blocks separately to that of the largest block freed so far (up to 32 MB), and keeps smaller
/// blocks in heaps that can only shrink at their end: memory taken by a burst of large requests would stay with the
/// process. [`return_free_pages`] returns smaller blocks.
pub fn return_large_blocks() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, LARGE), (libc::M_TRIM_THRESHOLD, LOOSE)] {
        // SAFETY: the call takes two numbers, touches no memory of ours, and locks the allocator while it changes its
        // parameters.
        unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns whole pages that are free inside the heaps to the system.
pub fn return_free_pages() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes a number, and locks each heap of the allocator while it looks through it.
    unsafe {
        libc::malloc_trim(0)
    };
}
