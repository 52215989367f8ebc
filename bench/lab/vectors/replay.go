package vectors

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"

	"evenkeel/bench/lab/report"
	"evenkeel/bench/lab/trace"
	"evenkeel/dispatcher/policy"
)

// Recorded names the log itself among the policies of a replay.
const Recorded = "recorded"

// maxLogLine bounds one round of the log: 1,024 ranks of 256 requests.
const maxLogLine = 64 << 20

// logLine is a line of the decision log; `in` is read by package vectors.
type logLine struct {
	Tick   uint64      `json:"tick"`
	TMs    float64     `json:"t_ms"`
	Group  string      `json:"group"`
	Assign [][2]uint64 `json:"assign"`
}

// replayed is what one policy did with the log.
type replayed struct {
	spec   policy.Spec
	made   map[string]policy.Policy // by group and what the snapshot completed
	sums   map[report.Metric]float64
	rounds float64
}

// Replay lets every policy decide on the snapshots of a decision log. Each round
// starts from what was recorded, whatever the policy decided before; one value
// of a policy serves a group, so that those with a memory have one. The first
// run is the log's own. A last line that its writer has not finished is left
// out, and cut says so.
func Replay(ctx context.Context, log io.Reader, name string, policies []string,
	progress func(rounds int)) (out []report.Run, cut bool, err error) {
	runs := []*replayed{{sums: map[report.Metric]float64{}}}
	for _, text := range policies {
		spec, err := policy.ParseSpec(text)
		if err != nil {
			return nil, false, err
		}
		runs = append(runs, &replayed{spec: spec, made: map[string]policy.Policy{}, sums: map[report.Metric]float64{}})
	}
	lines := trace.Lines{Name: name, Most: maxLogLine, What: "is it a decision log?"}
	if _, err := lines.Each(log, func(n int, line []byte, whole bool) (more bool, err error) {
		if cut = !whole && !json.Valid(line); cut {
			return false, nil
		}
		if err := replayLine(line, runs); err != nil {
			return false, err
		}
		if progress != nil {
			progress(n)
		}
		return ctx.Err() == nil, nil
	}); err != nil {
		return nil, false, err
	}
	if ctx.Err() != nil {
		return nil, false, context.Cause(ctx)
	}
	if runs[0].rounds == 0 {
		return nil, cut, fmt.Errorf("%s: no rounds in it", name)
	}
	out = make([]report.Run, len(runs))
	for i, r := range runs {
		out[i] = report.Run{Policy: Recorded, Seeds: 1, Metrics: r.metrics()}
		if i > 0 {
			out[i].Policy = policies[i-1]
		}
	}
	return out, cut, nil
}

func replayLine(text []byte, runs []*replayed) error {
	var line logLine
	if err := json.Unmarshal(text, &line); err != nil {
		return fmt.Errorf("not a line of a decision log: %w", err)
	}
	s, params, err := ReadSnapshot(text)
	if err != nil {
		return err
	}
	recorded := make([]policy.Assignment, len(line.Assign))
	for i, a := range line.Assign {
		if a[1] > math.MaxInt32 {
			return fmt.Errorf("assign[%d]: worker %d", i, a[1])
		}
		recorded[i] = policy.Assignment{Entry: a[0], Worker: int32(a[1])}
	}
	if err := runs[0].round(&s, recorded, recorded); err != nil {
		return err
	}
	for _, r := range runs[1:] {
		p, err := r.policy(line.Group, params)
		if err != nil {
			return err
		}
		own := s
		if params.MaxAgeMs == nil || r.spec.Sets("max_age_ms") { // else the guard in force when it was taken
			own.MaxAgeMs = p.MaxAgeMs()
		}
		if err := r.round(&s, p.Decide(&own, nil), recorded); err != nil {
			return fmt.Errorf("policy %s: %w", p.Name(), err)
		}
	}
	return nil
}

// policy is the one that decides for a group: what the log's parameters say
// where the spec is silent, as `evenkeel decide` has it.
func (r *replayed) policy(group string, params Params) (policy.Policy, error) {
	params.MaxAgeMs = nil // the one that was in force changes from round to round
	spec, err := params.Complete(r.spec)
	if err != nil {
		return nil, err
	}
	key := group + "\x00" + spec.String()
	if r.made[key] == nil {
		r.made[key] = spec.Build()
	}
	return r.made[key], nil
}

// round measures the loads right after the assignments, and how many of them
// are the recorded ones.
func (r *replayed) round(s *policy.Snapshot, assigned, recorded []policy.Assignment) error {
	loads := make([]int64, len(s.Workers))
	for g := range s.Workers {
		loads[g] = s.Workers[g].KVTokens()
	}
	for _, a := range assigned {
		g := slices.IndexFunc(s.Workers, func(w policy.Worker) bool { return w.ID == a.Worker })
		e := slices.IndexFunc(s.Pool, func(e policy.Entry) bool { return e.ID == a.Entry })
		if g < 0 || e < 0 {
			return fmt.Errorf("entry %d to worker %d: one of them is not in the snapshot", a.Entry, a.Worker)
		}
		loads[g] += int64(s.Pool[e].Prompt)
	}
	same := 0
	for _, a := range assigned {
		if slices.ContainsFunc(recorded, func(b policy.Assignment) bool { return a.Entry == b.Entry && a.Worker == b.Worker }) {
			same++
		}
	}
	b := policy.Measure(loads)
	r.rounds++
	r.sums[report.Imbalance] += float64(b.Imbalance())
	r.sums[report.MaxMinusMin] += float64(b.MaxMinusMin())
	r.sums[report.IdleShare] += b.IdleShare()
	r.sums[report.Placed] += float64(len(assigned))
	if same == len(recorded) && same == len(assigned) {
		r.sums[report.Agreement]++
	}
	r.sums[report.SamePairs] += float64(same)
	r.sums[recordedSum] += float64(len(recorded))
	return nil
}

// recordedSum counts the log's assignments; it is no metric of the outcome.
const recordedSum report.Metric = ""

func (r *replayed) metrics() report.Metrics {
	all := report.Sample{report.Rounds: r.rounds}
	for name, sum := range r.sums {
		switch name {
		case recordedSum:
		case report.SamePairs:
			all[name] = sum / r.sums[recordedSum] // NaN, so not measured, of none
		default:
			all[name] = sum / r.rounds
		}
	}
	return report.Summarize(all)
}
