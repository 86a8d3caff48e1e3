//! An overlap policy for each pass of attention.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{OverlapPolicy, PolicyError};

/// How the forward and the backward are each brought to overlap. Written as one policy for both, or as
/// `forward=POLICY,backward=POLICY`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PassPolicies {
    /// Of the forward.
    pub forward: OverlapPolicy,
    /// Of the backward.
    pub backward: OverlapPolicy,
}

impl PassPolicies {
    /// Workers that some pass leaves free: the larger of both margins.
    pub fn sm_margin(&self) -> usize {
        self.forward.sm_margin().max(self.backward.sm_margin())
    }
}

impl From<OverlapPolicy> for PassPolicies {
    /// One policy for both passes.
    fn from(policy: OverlapPolicy) -> Self {
        Self { forward: policy, backward: policy }
    }
}

impl fmt::Display for PassPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, backward } = self;
        match forward == backward {
            true => forward.fmt(f),
            false => write!(f, "forward={forward},backward={backward}"),
        }
    }
}

impl FromStr for PassPolicies {
    type Err = PolicyError;

    fn from_str(text: &str) -> Result<Self, PolicyError> {
        if !text.contains(',') && !text.starts_with("forward=") && !text.starts_with("backward=") {
            return text.parse::<OverlapPolicy>().map(Self::from);
        }
        let (mut forward, mut backward) = (None, None);
        for part in text.split(',') {
            let of_pass = match part.split_once('=') {
                Some(("forward", policy)) => (&mut forward, policy),
                Some(("backward", policy)) => (&mut backward, policy),
                _ => return Err(PolicyError::Passes { text: part.to_owned() }),
            };
            let (pass, policy) = of_pass;
            if pass.replace(policy.parse()?).is_some() {
                return Err(PolicyError::Passes { text: part.to_owned() });
            }
        }
        match (forward, backward) {
            (Some(forward), Some(backward)) => Ok(Self { forward, backward }),
            _ => Err(PolicyError::Passes { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in
            ["sequential", "concurrent+sm-margin=16", "forward=sequential,backward=concurrent+sm-margin=8"]
        {
            assert_eq!(text.parse::<PassPolicies>().unwrap().to_string(), text);
        }
        let turned: PassPolicies = "backward=sequential,forward=concurrent".parse().unwrap();
        assert_eq!(turned.to_string(), "forward=concurrent,backward=sequential");
        let margins: PassPolicies = "forward=sm-margin=8,backward=sm-margin=16".parse().unwrap();
        assert_eq!((margins.forward.sm_margin(), margins.sm_margin()), (8, 16));
    }

    #[test]
    fn a_pass_is_named_once_and_none_is_left_out() {
        let refused = |text: &str| text.parse::<PassPolicies>().unwrap_err();
        for text in [
            "forward=concurrent",
            "forward=concurrent,forward=sequential",
            "forward=concurrent,sequential",
            "concurrent,sequential",
        ] {
            assert!(matches!(refused(text), PolicyError::Passes { .. }), "{text}");
        }
        assert!(matches!(refused("forward=fast,backward=sequential"), PolicyError::Unknown { .. }));
    }
}
