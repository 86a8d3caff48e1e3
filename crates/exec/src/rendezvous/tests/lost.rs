//! Ranks that are lost, and worlds that do not fit.

use super::*;

#[test]
fn a_rank_whose_connection_breaks_is_lost_to_all() {
    let ports = [free_port()];
    thread::scope(|scope| {
        let others: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let joined = join(rank, 3, &ports, LIMIT)?;
                    joined.barrier("the end")
                })
            })
            .collect();
        let dying = scope.spawn(move || {
            let joined = join(1, 3, &ports, LIMIT).unwrap();
            joined.break_connection();
        });
        dying.join().unwrap();
        for other in others {
            let error = error_of(other.join().unwrap().unwrap_err());
            assert!(matches!(error, RendezvousError::Lost { lost: 1, .. }), "{error}");
        }
    });
}

#[test]
fn a_world_of_other_ranks_is_refused() {
    let errors = ranks(2, LIMIT, |rank| {
        let error = rank.attach(&World::new(3, WorldConfig::default())).unwrap_err();
        rank.barrier("end").unwrap();
        error
    });
    for (rank, error) in errors.iter().enumerate() {
        assert!(matches!(error, ExecError::BadCollective { rank: of, .. } if *of == rank), "{error}");
        assert!(error.to_string().contains("3 ranks and 2 have joined"), "{error}");
    }
}
