package main

import (
	"fmt"
	"math"
	"time"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/tools/page"
)

// autoLimit is by how much the twin's choice may be worse than the best policy of its list.
const autoLimit = 0.005

// autoLasts is how long each load lasts at least: the twin needs minutes to be sure, and then has the choice for
// as long as the load stays.
const autoLasts = 10 * time.Minute

// autoTable holds a policy that the twin chooses, the last one, against each of its list, on loads whose answers
// drift: there no policy of the list need be the best all the time.
func (t *trials) autoTable() string {
	choice := len(t.policies) - 1
	m := page.Markdown{Head: []string{"load"}}
	for _, p := range t.policies {
		m.Head = append(m.Head, "`"+p+"`")
	}
	shares := make([]float64, len(t.loads))
	behind := 0
	for i, l := range t.loads {
		best := math.Inf(-1)
		for p := range choice {
			best = max(best, t.of[i][p].of(report.TokensPerS))
		}
		row := []string{l.String()}
		for p := range t.policies {
			row = append(row, fmt.Sprintf("%.4f", t.of[i][p].of(report.TokensPerS)/best))
		}
		m.Add(row...)
		if shares[i] = t.of[i][choice].of(report.TokensPerS) / best; shares[i] < 1-autoLimit {
			behind++
		}
	}
	verdict := "met"
	if behind > 0 {
		verdict = "**not met**"
	}
	at, least, _ := worst(shares, true)
	return fmt.Sprintf("`go run ./bench/claims/regret -seed %d -loads %d -auto %s`: tokens/s as a multiple of the best policy of the list, on the loads whose answers drift, each for 10 minutes or more.\n\n%s\n"+
		"The twin's choice has %s of the best in the geometric mean, and %.4f on the worst load (%d). Aim: at most %.1f %% worse on each load. It is worse by more on %d of %d loads: %s.\n",
		t.seed, t.drawn, t.policies[choice], m.String(), interval(shares), least, t.loads[at].Number, 100*autoLimit, behind, len(t.loads), verdict)
}
