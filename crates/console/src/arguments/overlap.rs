//! What `--overlap` says: a policy, `auto`, or for attention one of them for each pass.

use std::fmt;

use counterpoint_schedule::{OverlapPolicy, PolicySupport, RankTransport, Workload};

use super::ValueFault;

/// An overlap policy by its own name.
pub fn named(text: &str) -> Result<OverlapPolicy, ValueFault> {
    Ok(text.parse()?)
}

/// An overlap policy, or `auto`.
pub fn choice(text: &str) -> Result<OverlapChoice, ValueFault> {
    if text == "auto" {
        return Ok(OverlapChoice::Auto);
    }
    named(text).map(OverlapChoice::Named)
}

/// What `--overlap` says of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlapChoice {
    /// Whatever is predicted to end first.
    Auto,
    /// This.
    Named(OverlapPolicy),
}

impl fmt::Display for OverlapChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Named(policy) => policy.fmt(f),
        }
    }
}

/// What `--overlap` says of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassOverlaps {
    /// Of the forward.
    pub forward: OverlapChoice,
    /// Of the backward.
    pub backward: OverlapChoice,
}

impl fmt::Display for PassOverlaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, backward } = self;
        match forward == backward {
            true => forward.fmt(f),
            false => write!(f, "forward={forward},backward={backward}"),
        }
    }
}

/// Several of them, as a list that is one argument: `forward=` and `backward=` that follow each other are one entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlapList(pub Vec<PassOverlaps>);

/// One entry.
pub fn of_passes(text: &str) -> Result<PassOverlaps, ValueFault> {
    match of_passes_list(text)?.0[..] {
        [one] => Ok(one),
        ref several => Err(ValueFault::OnePolicy { text: text.to_owned(), policies: several.len() }),
    }
}

/// A list; of an entry that names one pass alone the other is `auto`.
pub fn of_passes_list(text: &str) -> Result<OverlapList, ValueFault> {
    let mut list: Vec<PassOverlaps> = Vec::new();
    // The pass that the last entry may still be given.
    let mut open = None;
    for word in text.split(',') {
        let (pass, policy) = match word.split_once('=') {
            Some((pass @ ("forward" | "backward"), policy)) => (Some(pass), policy),
            _ => (None, word),
        };
        let policy = attention(policy)?;
        let auto = PassOverlaps { forward: OverlapChoice::Auto, backward: OverlapChoice::Auto };
        if pass.is_none() || open != pass {
            list.push(auto);
            open = None;
        }
        let joined = open.is_some();
        let Some(entry) = list.last_mut() else { continue };
        match pass {
            None => *entry = PassOverlaps { forward: policy, backward: policy },
            Some("forward") => entry.forward = policy,
            Some(_) => entry.backward = policy,
        }
        open = pass.filter(|_| !joined).map(|pass| if pass == "forward" { "backward" } else { "forward" });
    }
    Ok(OverlapList(list))
}

/// A policy of attention, on any transport.
fn attention(text: &str) -> Result<OverlapChoice, ValueFault> {
    let choice = choice(text)?;
    let OverlapChoice::Named(policy) = choice else { return Ok(choice) };
    // What all refuse alike is no matter of the transport.
    match RankTransport::Nvlink.support(&policy, Workload::Attention) {
        PolicySupport::Refused(reason) => Err(ValueFault::RefusedPolicy { reason }),
        PolicySupport::Runs | PolicySupport::WithoutEffect(_) => Ok(choice),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_that_follow_each_other_are_one_entry() {
        let read = |text: &str| {
            let list = of_passes_list(text).unwrap().0;
            list.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(read("sequential,auto"), ["sequential", "auto"]);
        assert_eq!(
            read("forward=concurrent,backward=sm-margin=16,sequential"),
            ["forward=concurrent,backward=concurrent+sm-margin=16", "sequential"]
        );
        assert_eq!(read("backward=sequential,forward=sequential"), ["sequential"]);
        assert_eq!(read("backward=sequential"), ["forward=auto,backward=sequential"]);
        assert_eq!(
            read("forward=sequential,forward=concurrent,backward=sequential,backward=auto"),
            ["forward=sequential,backward=auto", "forward=concurrent,backward=sequential", "auto"]
        );
    }

    #[test]
    fn one_is_asked_for_where_one_is_run() {
        assert_eq!(of_passes("auto").unwrap().forward, OverlapChoice::Auto);
        assert!(of_passes("sequential,concurrent").unwrap_err().to_string().contains("2 policies"));
        assert!(of_passes("forward=fused").unwrap_err().to_string().contains("linear layers"));
        assert!(of_passes("backward=fast").unwrap_err().to_string().contains("fast"));
    }
}
