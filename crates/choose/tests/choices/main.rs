//! A default is never predicted slower than an alternative that is offered: on random problems from a printed seed. The whole sets of
//! cases take minutes and are run by name: `cargo test -p counterpoint-choose --test choices -- --ignored --nocapture`.

mod case;
mod costs;
mod dispatches;
mod experts;
mod exposed;
mod gathers;
mod hosting;
mod large;
mod linear;
mod policies;
mod ratios;
mod record;
mod side_by_side;
mod traffic;
