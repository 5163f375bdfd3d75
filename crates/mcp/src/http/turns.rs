//! Decides whose request is handled next. Tenants with waiting requests get one turn after another, however many
//! requests and connections one of them has.
//!
//! A turn covers the work that keeps a processor busy: reading a message, and the work of its handler until it first
//! waits for something. There are as many turns as the runtime has threads. The holder of a turn yields once before it
//! works, so that all other requests that have arrived enter this queue, which distinguishes tenants, instead of
//! waiting in the runtime's queue.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine::op::Tenant;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

pub(super) struct Turns {
    most: usize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Number of turns that are taken.
    taken: usize,
    /// Tenants with waiting requests, the next one first. A tenant occurs at most once.
    order: VecDeque<Tenant>,
    waiting: HashMap<Tenant, VecDeque<oneshot::Sender<Turn>>>,
}

/// The right to work; dropping it gives the right to the next waiting request.
pub(super) struct Turn(Arc<Turns>);

impl Turns {
    /// Creates as many turns as the current runtime has worker threads.
    pub(super) fn for_runtime() -> Arc<Self> {
        Self::new(Handle::try_current().map_or(1, |runtime| runtime.metrics().num_workers()))
    }

    fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most: most.max(1), queue: Mutex::default() })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn take(self: &Arc<Self>, tenant: &Tenant) -> Turn {
        let turn = match self.enter(tenant) {
            Ok(turn) => turn,
            // The wait ends only with a turn, because a sender is never dropped while its receiver waits.
            Err(coming) => coming.await.unwrap_or_else(|_| self.another()),
        };
        tokio::task::yield_now().await;
        turn
    }

    fn enter(self: &Arc<Self>, tenant: &Tenant) -> Result<Turn, oneshot::Receiver<Turn>> {
        let mut queue = self.queue();
        if queue.taken < self.most && queue.order.is_empty() {
            queue.taken += 1;
            return Ok(Turn(self.clone()));
        }
        let (sender, receiver) = oneshot::channel();
        let own = queue.waiting.entry(tenant.clone()).or_default();
        own.push_back(sender);
        if own.len() == 1 {
            queue.order.push_back(tenant.clone());
        }
        Err(receiver)
    }

    fn another(self: &Arc<Self>) -> Turn {
        self.queue().taken += 1;
        Turn(self.clone())
    }
}

impl Queue {
    /// Returns the first waiting request of the next tenant, and moves the tenant to the end of the order.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        let tenant = self.order.pop_front()?;
        let own = self.waiting.get_mut(&tenant)?;
        let next = own.pop_front();
        if own.is_empty() {
            self.waiting.remove(&tenant);
        } else {
            self.order.push_back(tenant);
        }
        next
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let next = {
            let mut queue = self.0.queue();
            // Requests that no longer wait cannot receive the turn and are skipped.
            let next = std::iter::from_fn(|| queue.next()).find(|next| !next.is_closed());
            if next.is_none() {
                queue.taken -= 1;
            }
            next
        };
        // The turn is sent without the lock: if the receiver is gone after all, the turn comes back here and is dropped
        // like any other.
        if let Some(next) = next {
            let _ = next.send(Turn(self.0.clone()));
        }
    }
}

/// Runs `work` and ends the turn when the work waits for the first time.
pub(super) async fn during<T>(turn: Turn, work: impl Future<Output = T>) -> T {
    let mut turn = Some(turn);
    let mut work = pin!(work);
    poll_fn(|cx| {
        let polled = work.as_mut().poll(cx);
        turn.take();
        polled
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        Tenant(name.into())
    }

    /// Covers hostile row W29.
    #[tokio::test]
    async fn a_tenant_with_many_requests_gets_one_turn_before_the_next_tenant() {
        let turns = Turns::new(1);
        let first = turns.take(&tenant("flood")).await;
        let served = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for name in ["flood"; 50].into_iter().chain(["canary", "other", "canary"]) {
            let (turns, served) = (turns.clone(), served.clone());
            tasks.push(tokio::spawn(async move {
                let _turn = turns.take(&tenant(name)).await;
                served.lock().unwrap().push(name);
            }));
        }
        while turns.queue().waiting.values().map(VecDeque::len).sum::<usize>() < tasks.len() {
            tokio::task::yield_now().await;
        }
        drop(first);
        for task in tasks {
            task.await.unwrap();
        }
        let served = served.lock().unwrap();
        assert_eq!(served[..6], ["flood", "canary", "other", "flood", "canary", "flood"]);
        assert_eq!(served.len(), 53);
        let queue = turns.queue();
        assert_eq!((queue.taken, queue.order.len(), queue.waiting.len()), (0, 0, 0), "nothing is left over");
    }

    #[tokio::test]
    async fn who_gives_up_waiting_loses_nobody_s_turn() {
        let turns = Turns::new(1);
        let first = turns.take(&tenant("a")).await;
        let gone = tokio::spawn({
            let turns = turns.clone();
            async move { drop(turns.take(&tenant("a")).await) }
        });
        let stays = tokio::spawn({
            let turns = turns.clone();
            async move { drop(turns.take(&tenant("b")).await) }
        });
        while turns.queue().order.len() < 2 {
            tokio::task::yield_now().await;
        }
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        drop(first);
        stays.await.unwrap();
        assert_eq!(turns.queue().taken, 0);
    }

    #[tokio::test]
    async fn a_turn_is_over_at_the_first_wait() {
        let turns = Turns::new(1);
        let turn = turns.take(&tenant("a")).await;
        let (go_on, wait) = oneshot::channel::<()>();
        let mut work = pin!(during(turn, async { wait.await.is_ok() }));
        assert!(futures_util::poll!(work.as_mut()).is_pending());
        drop(turns.take(&tenant("b")).await);
        go_on.send(()).unwrap();
        assert!(work.await);
    }
}
