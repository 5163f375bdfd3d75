//! This module tracks the deadline of one call and the steps that follow it: interrupt, nudge, interrupt again, kill.
//!
//! It is pure: it knows no processes and reads no clock.

use std::time::{Duration, Instant};

use proto::{Deadline, RunStatus};

/// Time between the interrupt and the nudge, for kernels that have one.
const NUDGE_AFTER: Duration = Duration::from_millis(100);
/// Number of parts of the grace time. In its second half, the interrupt is repeated after each part. The first
/// interrupt may have been lost (Python drops it in a `__del__`), and code that is still cleaning up has had half of
/// the time for it.
const AGAIN_PARTS: u32 = 8;
/// Time after the start in which an interrupt may be lost: the kernel may still be reading the cell, and ignores
/// interrupts until it has read it.
const EARLY: Duration = Duration::from_secs(1);
/// Upper bound of deadlines, so that an absurd value does not overflow the clock.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    TimedOut,
    Cancelled,
}

/// A step that has to be taken now. Each step comes once, in this order; only `Again` comes several times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Interrupt,
    Nudge,
    Again,
    Kill,
}

#[derive(Debug)]
pub(crate) struct CallDeadline {
    pub started: Instant,
    ends: Instant,
    grace: Duration,
    stop: Option<Stop>,
}

#[derive(Debug)]
struct Stop {
    why: Why,
    at: Instant,
    next: Option<Step>,
    /// Number of times that the interrupt was repeated.
    again: u32,
}

impl CallDeadline {
    pub(crate) fn new(started: Instant, deadline: Deadline) -> Self {
        let bounded = |ms| Duration::from_millis(ms).min(LONGEST);
        Self { started, ends: started + bounded(deadline.after_ms), grace: bounded(deadline.grace_ms), stop: None }
    }

    /// Stops the call because the host cancelled it. If the call is already being stopped, the first reason stays.
    pub(crate) fn cancel(&mut self, now: Instant) {
        self.stop.get_or_insert(Stop::new(Why::Cancelled, now));
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now >= self.ends
    }

    /// Returns whether the stop came so early that its interrupt may be lost.
    pub(crate) fn stopped_early(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.at < self.started + EARLY)
    }

    /// Returns the status with which the call ends, if it was stopped.
    pub(crate) fn status(&self, state_kept: bool) -> Option<RunStatus> {
        self.stop.as_ref().map(|stop| match stop.why {
            Why::TimedOut => RunStatus::TimedOut { state_kept },
            Why::Cancelled => RunStatus::Cancelled { state_kept },
        })
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        match &self.stop {
            None => Some(self.ends),
            Some(stop) => stop.next.map(|step| stop.time_of(step, self.grace)),
        }
    }

    /// Returns the next step if its time has come.
    pub(crate) fn due(&mut self, now: Instant) -> Option<Step> {
        if self.stop.is_none() && self.is_over(now) {
            self.stop = Some(Stop::new(Why::TimedOut, now));
        }
        let grace = self.grace;
        let stop = self.stop.as_mut()?;
        let step = stop.next?;
        if now < stop.time_of(step, grace) {
            return None;
        }
        stop.again += u32::from(step == Step::Again);
        stop.next = match step {
            Step::Interrupt if NUDGE_AFTER < grace => Some(Step::Nudge),
            Step::Interrupt | Step::Nudge => Some(Step::Again),
            Step::Again if stop.again < AGAIN_PARTS / 2 => Some(Step::Again),
            Step::Again => Some(Step::Kill),
            Step::Kill => None,
        };
        Some(step)
    }
}

impl Stop {
    fn new(why: Why, at: Instant) -> Self {
        Self { why, at, next: Some(Step::Interrupt), again: 0 }
    }

    fn time_of(&self, step: Step, grace: Duration) -> Instant {
        match step {
            Step::Interrupt => self.at,
            Step::Nudge => self.at + NUDGE_AFTER,
            Step::Again => self.at + grace * (AGAIN_PARTS / 2 + self.again) / AGAIN_PARTS,
            Step::Kill => self.at + grace,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(term: &mut CallDeadline, start: Instant) -> Vec<(u128, Step)> {
        let mut seen = Vec::new();
        while let Some(at) = term.wake_at() {
            seen.extend(term.due(at).map(|step| ((at - start).as_millis(), step)));
        }
        seen
    }

    #[test]
    fn a_deadline_goes_down_the_ladder_once() {
        let start = Instant::now();
        let mut term = CallDeadline::new(start, Deadline { after_ms: 1000, grace_ms: 800 });
        assert_eq!(term.due(start), None);
        let again = [1400, 1500, 1600, 1700].map(|at| (at, Step::Again));
        let expected = [&[(1000, Step::Interrupt), (1100, Step::Nudge)], &again[..], &[(1800, Step::Kill)]].concat();
        assert_eq!(steps(&mut term, start), expected);
        assert_eq!(term.status(true), Some(RunStatus::TimedOut { state_kept: true }));
    }

    #[test]
    fn a_cancel_before_the_deadline_stays_a_cancel() {
        let start = Instant::now();
        let mut term = CallDeadline::new(start, Deadline { after_ms: 10, grace_ms: 50 });
        term.cancel(start);
        let steps = steps(&mut term, start);
        assert_eq!((steps.first(), steps.last()), (Some(&(0, Step::Interrupt)), Some(&(50, Step::Kill))));
        assert!(!steps.iter().any(|(_, step)| *step == Step::Nudge), "{steps:?}");
        assert_eq!(term.status(false), Some(RunStatus::Cancelled { state_kept: false }));
    }

    #[test]
    fn an_absurd_deadline_does_not_overflow() {
        let mut term = CallDeadline::new(Instant::now(), Deadline { after_ms: u64::MAX, grace_ms: u64::MAX });
        term.cancel(Instant::now());
        assert!(term.wake_at().is_some());
    }
}
