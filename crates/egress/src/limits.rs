//! Limits on the traffic of a sandbox (connections, bytes, and their rates), and the timeout of idle connections.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::lock;
use crate::policy::{DenyReason, EgressLimits, Limit};

/// Time after which a connection without a byte in either direction is closed. It is long enough for a slow answer.
const SILENCE: Duration = Duration::from_secs(600);

/// Maximum rate at which the proxy refuses requests of one sandbox. Refusals cost the sandbox next to nothing and no
/// outside host slows them down, but they use the host's processors, which all tenants share. A page full of
/// advertisements needs a few hundred.
const REFUSALS_PER_SECOND: f64 = 100.0;
const REFUSALS_AT_ONCE: f64 = 500.0;

/// A token bucket with a rate per second and a burst. Taking more than is available creates a debt that has to be
/// waited out.
#[derive(Debug)]
pub(crate) struct Bucket {
    rate: f64,
    burst: f64,
    level: f64,
    at: Instant,
}

impl Bucket {
    pub(crate) fn new(rate: f64, burst: f64) -> Self {
        Self { rate, burst, level: burst, at: Instant::now() }
    }

    fn refill(&mut self) {
        let now = Instant::now();
        self.level = (self.level + now.duration_since(self.at).as_secs_f64() * self.rate).min(self.burst);
        self.at = now;
    }

    pub(crate) fn take(&mut self, amount: f64) {
        self.refill();
        self.level -= amount;
    }

    pub(crate) fn try_take(&mut self) -> bool {
        self.refill();
        let available = self.level >= 1.0;
        if available {
            self.level -= 1.0;
        }
        available
    }

    /// Returns the time at which a debt is paid off, or `None` if there is no debt.
    fn debt(&mut self) -> Option<Instant> {
        self.refill();
        (self.level < 0.0).then(|| self.at + Duration::from_secs_f64((-self.level / self.rate).min(3600.0)))
    }
}

/// Counts the traffic of one sandbox and enforces its limits.
#[derive(Debug)]
pub(crate) struct Meter {
    pub permits: Arc<Semaphore>,
    pub connections: Limit<u32>,
    arrivals: Mutex<Bucket>,
    dials: Mutex<Bucket>,
    refusals: Mutex<Bucket>,
    bytes: Option<(Limit<u64>, AtomicU64)>,
    rate: Option<Mutex<Bucket>>,
    reported: AtomicBool,
}

impl Meter {
    pub(crate) fn new(limits: EgressLimits) -> Self {
        let per_second = f64::from(limits.connections_per_second);
        let rate = limits.bytes_per_second.map(|rate| Mutex::new(Bucket::new(rate as f64, rate as f64)));
        Self {
            permits: Arc::new(Semaphore::new(limits.connections.value.min(65_536) as usize)),
            connections: limits.connections,
            arrivals: Mutex::new(Bucket::new(per_second, per_second)),
            dials: Mutex::new(Bucket::new(per_second, per_second)),
            refusals: Mutex::new(Bucket::new(REFUSALS_PER_SECOND, REFUSALS_AT_ONCE)),
            bytes: limits.bytes.map(|limit| (limit, AtomicU64::new(0))),
            rate,
            reported: AtomicBool::new(false),
        }
    }

    /// Waits until the sandbox may open another connection to the proxy, and counts it.
    pub(crate) async fn arrival(&self) {
        take_one(&self.arrivals).await;
    }

    /// Waits until the proxy may open another connection to a host, and counts it. It is counted separately because
    /// one connection from the sandbox may ask for many.
    pub(crate) async fn dial(&self) {
        take_one(&self.dials).await;
    }

    /// Waits until the proxy may refuse another request, and counts it.
    pub(crate) async fn refusal(&self) {
        take_one(&self.refusals).await;
    }

    /// Returns an error if the sandbox has used up its bytes.
    pub(crate) fn spent(&self) -> Result<(), DenyReason> {
        match &self.bytes {
            Some((limit, used)) if used.load(Ordering::Relaxed) >= limit.value => {
                Err(limit.refusal(&format!("{} bytes over the life of a sandbox", limit.value), "max_mb"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the error of [`Self::spent`] once, so that it is reported once.
    fn spent_unreported(&self) -> Option<DenyReason> {
        let refusal = self.spent().err()?;
        (!self.reported.swap(true, Ordering::Relaxed)).then_some(refusal)
    }

    pub(crate) fn charge(&self, bytes: usize) {
        if let Some((_, used)) = &self.bytes {
            used.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        if let Some(rate) = &self.rate {
            lock(rate).take(bytes as f64);
        }
    }

    fn debt(&self) -> Option<Instant> {
        lock(self.rate.as_ref()?).debt()
    }
}

/// Takes one token, and waits until the debt is paid off.
async fn take_one(bucket: &Mutex<Bucket>) {
    let debt = {
        let mut bucket = lock(bucket);
        bucket.take(1.0);
        bucket.debt()
    };
    if let Some(until) = debt {
        sleep_until(until).await;
    }
}

/// Counts the bytes of a connection, and reports when no more are allowed.
pub(crate) trait Metered: Send + Sync {
    fn meter(&self) -> &Meter;
    fn moved(&self, bytes: usize);
    fn overdrawn(&self, refusal: DenyReason);
}

/// A stream that times out when nothing moves for a long time, and that counts the bytes moved if `metered` is set.
pub(crate) struct Flow<S> {
    inner: S,
    metered: Option<Arc<dyn Metered>>,
    active: Instant,
    silence: Pin<Box<Sleep>>,
    pause: Option<Pin<Box<Sleep>>>,
}

impl<S> Flow<S> {
    pub(crate) fn new(inner: S, metered: Option<Arc<dyn Metered>>) -> Self {
        let active = Instant::now();
        Self { inner, metered, active, silence: Box::pin(sleep_until(active + SILENCE)), pause: None }
    }

    /// Completes when bytes may move.
    fn poll_allowed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(metered) = &self.metered else { return Poll::Ready(Ok(())) };
        let meter = metered.meter();
        if meter.spent().is_err() {
            if let Some(refusal) = meter.spent_unreported() {
                metered.overdrawn(refusal);
            }
            return Poll::Ready(Err(io::Error::other("the policy allows no more bytes")));
        }
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match meter.debt() {
                None => return Poll::Ready(Ok(())),
                Some(until) => self.pause = Some(Box::pin(sleep_until(until))),
            }
        }
    }

    fn moved<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: Poll<io::Result<T>>,
        bytes: impl FnOnce(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        match poll {
            Poll::Ready(Ok(done)) => {
                self.active = Instant::now();
                if let Some(metered) = &self.metered {
                    metered.moved(bytes(&done));
                }
                Poll::Ready(Ok(done))
            }
            Poll::Ready(Err(e)) => Poll::Ready(Err(e)),
            Poll::Pending => loop {
                ready!(self.silence.as_mut().poll(cx));
                let end = self.active + SILENCE;
                if end <= Instant::now() {
                    return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                }
                self.silence.as_mut().reset(end);
            },
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Flow<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_allowed(cx))?;
        let before = buf.filled().len();
        let poll = Pin::new(&mut this.inner).poll_read(cx, buf);
        this.moved(cx, poll, |()| buf.filled().len() - before)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Flow<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_allowed(cx))?;
        let poll = Pin::new(&mut this.inner).poll_write(cx, buf);
        this.moved(cx, poll, |n| *n)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_allowed(cx))?;
        let poll = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        this.moved(cx, poll, |n| *n)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_bucket_gives_its_burst_at_once_and_then_its_rate() {
        let mut bucket = Bucket::new(10.0, 5.0);
        let start = Instant::now();
        for _ in 0..25 {
            bucket.take(1.0);
            if let Some(until) = bucket.debt() {
                sleep_until(until).await;
            }
        }
        let elapsed = start.elapsed();
        assert!((Duration::from_millis(1990)..Duration::from_millis(2100)).contains(&elapsed), "{elapsed:?}");
    }
}
