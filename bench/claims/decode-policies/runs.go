package main

import (
	"fmt"
	"strings"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/decode"
	"evenkeel/bench/tools/page"
	"evenkeel/bench/tools/policytables"
	"evenkeel/dispatcher/board"
)

// scenario is a load on a fleet.
type scenario struct {
	on           *policytables.Source
	ranks, slots int
	rho          float64 // open loop; 0: closed
	pool         int     // closed loop: requests beyond the slots
	capacity     int64   // KV tokens of a rank; 0: unlimited
	stale        int     // steps
	transfer     int     // steps
}

// closed is the closed loop that evenkeel simulate has by default.
func closed(on *policytables.Source, ranks int) scenario {
	return scenario{on: on, ranks: ranks, slots: slotsOfRank, pool: poolOfRank * ranks}
}

func open(on *policytables.Source, ranks int, rho float64) scenario {
	return scenario{on: on, ranks: ranks, slots: slotsOfRank, rho: rho}
}

// A rank decodes so many requests at once, and so many wait for it in a closed
// loop.
const (
	slotsOfRank = 16
	poolOfRank  = 4
)

func (sc scenario) size() string { return fmt.Sprintf("%d x %d", sc.ranks, sc.slots) }

func (sc scenario) load() string {
	if sc.rho > 0 {
		return fmt.Sprintf("rho %g", sc.rho)
	}
	if sc.pool != poolOfRank*sc.ranks {
		return fmt.Sprintf("closed, pool of %d", sc.pool)
	}
	return "closed"
}

func (sc scenario) String() string {
	s := report.Words{Text: fmt.Sprintf("%s, %s, %s", sc.on.Name, sc.size(), sc.load()), Before: ", "}
	s.Add(sc.capacity > 0, "%s KV tokens a rank", report.Grouped(float64(sc.capacity), 0))
	s.Add(sc.stale > 0 || sc.transfer > 0, "seen %d steps late, transfer %d", sc.stale, sc.transfer)
	return s.Text
}

// command simulates the scenario by itself; empty where the command line knows no
// such trace.
func (b *book) command(sc scenario, policies []string) string {
	if sc.on.Flag == "" {
		return ""
	}
	requests := b.requests(sc.on)
	line := report.Words{Text: fmt.Sprintf("evenkeel simulate --trace %s --workers %d --slots %d", sc.on.Flag, sc.ranks, sc.slots),
		Before: " "}
	line.Add(sc.rho > 0, "--load %g", sc.rho)
	line.Add(sc.rho == 0 && sc.pool != poolOfRank*sc.ranks, "--pool %d", sc.pool)
	line.Add(sc.capacity > 0, "--capacity %d", sc.capacity)
	line.Add(sc.stale > 0, "--stale %d", sc.stale)
	line.Add(sc.transfer > 0, "--transfer %d", sc.transfer)
	line.Add(requests > 0, "--requests %d", requests)
	line.Add(true, "--seeds %d --policies %s", b.Seeds, strings.Join(policies, ","))
	return line.Text
}

// at is what policies did in a scenario.
func (b *book) at(sc scenario, policies ...string) *page.Outcome {
	return b.In(sc, policies, func(o *page.Outcome, lacking []string) error {
		plan := decode.Plan{
			Policies: lacking, Source: sc.on.From, Requests: b.requests(sc.on), Seeds: b.Seeds,
			Fleet: decode.Uniform(sc.ranks, sc.slots, sc.capacity), Load: decode.Load{Rho: sc.rho, Pool: sc.pool}, Window: board.DefaultWindow,
		}
		plan.Fleet.Stale, plan.Fleet.Transfer = sc.stale, sc.transfer
		if err := plan.Validate(); err != nil {
			return o.Refuse(err)
		}
		result, err := plan.Run(b.Ctx)
		if err != nil {
			return err
		}
		for _, r := range result.Runs {
			o.Metrics[r.Policy] = decode.Repeatable(r.Metrics)
		}
		return nil
	})
}
