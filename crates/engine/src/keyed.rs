//! Turns by name. Work under the same name is done one piece after the other, in order of arrival. This module knows
//! nothing about the work.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

use tokio::sync::OwnedMutexGuard;

use crate::guest::lock;

/// State under a name, which the owner of a turn finds and leaves behind.
pub(crate) trait KeyedState: Default {
    /// Returns whether the state is empty, so that the name can be forgotten.
    fn is_empty(&self) -> bool;
}

impl KeyedState for () {
    fn is_empty(&self) -> bool {
        true
    }
}

pub(crate) struct Keyed<T> {
    all: Arc<Mutex<Table<T>>>,
}

type Table<T> = HashMap<String, Arc<tokio::sync::Mutex<T>>>;

impl<T> Clone for Keyed<T> {
    fn clone(&self) -> Self {
        Self { all: self.all.clone() }
    }
}

impl<T> Default for Keyed<T> {
    fn default() -> Self {
        Self { all: Arc::default() }
    }
}

impl<T: KeyedState> Keyed<T> {
    /// Waits for the turn. Turns are given in the order in which the futures are first polled.
    pub(crate) async fn turn(&self, name: &str) -> Turn<T> {
        let (entry, slot) = self.enter(name);
        let guard = slot.lock_owned().await;
        Turn { guard, _entry: entry }
    }

    /// Takes the turn if it is free.
    pub(crate) fn try_turn(&self, name: &str) -> Option<Turn<T>> {
        let (entry, slot) = self.enter(name);
        let guard = slot.try_lock_owned().ok()?;
        Some(Turn { guard, _entry: entry })
    }

    fn enter(&self, name: &str) -> (KeyedEntry<T>, Arc<tokio::sync::Mutex<T>>) {
        let slot = lock(&self.all).entry(name.to_owned()).or_default().clone();
        (KeyedEntry { all: self.all.clone(), name: name.to_owned() }, slot)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        lock(&self.all).contains_key(name)
    }

    /// Returns the names that are in use, are waited for, or have state left behind.
    pub(crate) fn names(&self) -> Vec<String> {
        lock(&self.all).keys().cloned().collect()
    }
}

/// Forgets the name when the last entry for it is dropped.
struct KeyedEntry<T: KeyedState> {
    all: Arc<Mutex<Table<T>>>,
    name: String,
}

impl<T: KeyedState> Drop for KeyedEntry<T> {
    fn drop(&mut self) {
        let mut all = lock(&self.all);
        // Only the table refers to the slot, and its lock keeps others from taking it in the meantime.
        let is_unused = |slot: &Arc<tokio::sync::Mutex<T>>| {
            Arc::strong_count(slot) == 1 && slot.try_lock().is_ok_and(|left| left.is_empty())
        };
        if all.get(&self.name).is_some_and(is_unused) {
            all.remove(&self.name);
        }
    }
}

pub(crate) struct Turn<T: KeyedState> {
    guard: OwnedMutexGuard<T>,
    // Must come after `guard`, because fields are dropped in this order.
    _entry: KeyedEntry<T>,
}

impl<T: KeyedState> Deref for Turn<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: KeyedState> DerefMut for Turn<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl KeyedState for u32 {
        fn is_empty(&self) -> bool {
            *self == 0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turns_of_one_name_go_one_after_the_other_and_names_are_forgotten() {
        let turns: Keyed<u32> = Keyed::default();
        let mut first = turns.turn("a").await;
        assert!(turns.try_turn("a").is_none());
        assert!(turns.try_turn("b").is_some());
        *first = 7;
        let second = {
            let turns = turns.clone();
            tokio::spawn(async move { *turns.turn("a").await })
        };
        tokio::task::yield_now().await;
        drop(first);
        assert_eq!(second.await.unwrap(), 7);
        assert_eq!(turns.names(), ["a"], "something was left under it");
        *turns.turn("a").await = 0;
        assert!(turns.names().is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_name_is_left_over_however_many_come_and_go() {
        let turns: Keyed<()> = Keyed::default();
        let tasks: Vec<_> = (0..200)
            .map(|n| {
                let turns = turns.clone();
                tokio::spawn(async move {
                    let waiting = tokio::time::timeout(std::time::Duration::from_micros(n * 7), turns.turn("a"));
                    if let Ok(turn) = waiting.await {
                        tokio::task::yield_now().await;
                        drop(turn);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert!(turns.names().is_empty());
    }
}
