package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/report"
	"evenkeel/bench/sim/mixed"
)

// Settings are chosen on loads of a seed that no table has.
const (
	tuningSeed  = 3
	tuningLoads = 6
)

// setting is what an operator can start engines with that prefill and decode.
type setting struct {
	budget  int32   // tokens that a rank computes in a step
	every   int     // prompts are computed in every so many-th step
	delay   int     // passes for which the engines hold prompts; 0: they hold none
	balance balance // how the engine chooses the rank of a request; evenkeel chooses it by itself
}

// balance is a --load-balance-method of SGLang. vLLM has one way.
type balance int

const (
	inTurn balance = iota // SGLang's default
	byRequests
	byTokens
)

func (b balance) String() string {
	return [...]string{"round_robin", "total_requests", "total_tokens"}[b]
}

// asStarted is what an engine does without flags: vLLM 0.32 has 8,192 tokens in a rank's step on
// these GPUs, and SGLang 0.5.23 divides as many among the ranks of DP attention (server_args.py).
func asStarted(e *laws.Entry) setting {
	s := setting{budget: 8192, every: 1}
	if e.Engine == "sglang" {
		s.budget /= int32(e.Ranks)
	}
	return s
}

// The budgets that are tried. With 1,024, nearly all steps with prompts are small ones outside of
// CUDA graphs, and the laws have no fixed time of such steps. So no setting is chosen by it, and it
// is shown apart.
var budgets = []int32{2048, 4096, 8192, 16384}

const (
	smallBudget = 1024
	mostEvery   = 4
	passes      = 30 // of SGLang's delayer, its default
)

// settings are those that are tried for an engine, alone or behind evenkeel, which holds prompts
// itself.
func settings(e *laws.Entry, behind bool) (all []setting) {
	for _, budget := range budgets {
		for b := inTurn; b <= byTokens; b++ {
			if b > inTurn && (behind || e.Engine != "sglang") {
				break
			}
			for every := 1; every <= mostEvery; every++ {
				all = append(all, setting{budget: budget, every: every, balance: b})
			}
			if e.Engine == "sglang" && !behind {
				all = append(all, setting{budget: budget, every: 1, balance: b, delay: passes})
			}
		}
	}
	return all
}

// flags are those of the engine that a setting is started with.
func (s setting) flags(e *laws.Entry) string {
	if s == asStarted(e) {
		return "none"
	}
	var words []string
	add := func(is bool, format string, args ...any) {
		if is {
			words = append(words, fmt.Sprintf(format, args...))
		}
	}
	if e.Engine == "sglang" {
		add(s.budget != asStarted(e).budget, "--chunked-prefill-size %d", int(s.budget)*e.Ranks)
		add(s.every > 1, "--prefill-decode-interval %d", s.every-1)
		add(s.balance != inTurn, "--load-balance-method %v", s.balance)
		add(s.delay > 0, "--enable-prefill-delayer")
	} else {
		add(s.budget != asStarted(e).budget, "--max-num-batched-tokens %d", s.budget)
		add(s.every > 1, "--prefill-schedule-interval %d", s.every)
	}
	return "`" + strings.Join(words, " ") + "`"
}

// words are a setting in short: the tokens of a rank in a step, and what else is set.
func (s setting) words() string {
	text := strconv.Itoa(int(s.budget))
	if s.every > 1 {
		text += fmt.Sprintf(", 1 of %d steps", s.every)
	}
	if s.balance != inTurn {
		text += ", " + s.balance.String()
	}
	if s.delay > 0 {
		text += ", delayer"
	}
	return text
}

// side is an engine with a setting, alone or behind evenkeel.
type side struct {
	setting
	behind bool
}

// serve is what a side makes of a load.
func (s side) serve(ctx context.Context, e *laws.Entry, load *mixed.Load) (report.Sample, error) {
	p := mixed.Contender{Name: ours, Spec: ours, Learn: true}
	if !s.behind {
		p = mixed.Own(e.Engine)
		switch s.balance {
		case byRequests:
			p.Spec = "jsq"
		case byTokens:
			p.Spec, p.Route = "", mixed.LeastTokens
		}
	}
	p.Budget, p.Every, p.Rests, p.Delay = s.budget, s.every, e.Engine == "sglang", s.delay
	got, err := mixed.Serve(ctx, load, p)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", load, err)
	}
	return report.Sample{report.TokensPerS: got.Tokens, report.TTFTMean: got.TTFT, report.TPOTP95: got.TPOT95}, nil
}

// match is what is compared: an engine alone, and one behind evenkeel.
type match struct{ theirs, ours side }

// plan are the matches of a row.
type plan struct {
	started  match // as engines start
	atTheirs match // the engine has most tokens/s, and evenkeel as many as it can with first tokens that come as early
	atOurs   match // evenkeel has most tokens/s, and the engine as many as it can with first tokens that come as early
	small    match // both with smallBudget
}

func (p *plan) all() []match { return []match{p.started, p.atTheirs, p.atOurs, p.small} }

// tried is a side with the geometric means of what it made of the loads that settings are chosen
// on.
type tried struct {
	side
	tokens, ttft float64
}

// best is the side with most tokens/s of those whose mean TTFT is not above the limit, or the one
// with the shortest TTFT if there is none.
func best(all []tried, limit float64) tried {
	var most, soonest *tried
	for i := range all {
		t := &all[i]
		if soonest == nil || t.ttft < soonest.ttft {
			soonest = t
		}
		if t.ttft <= limit && (most == nil || t.tokens > most.tokens) {
			most = t
		}
	}
	if most == nil {
		most = soonest
	}
	return *most
}

// tune chooses the settings of each row whose ranks prefill and decode.
func tune(ctx context.Context, all []judged, progress io.Writer) error {
	type candidate struct {
		*judged
		side
	}
	var candidates []candidate
	for i := range all {
		if j := &all[i]; j.both {
			for _, behind := range []bool{false, true} {
				for _, s := range settings(j.law, behind) {
					candidates = append(candidates, candidate{j, side{s, behind}})
				}
			}
		}
	}
	got, err := report.Trials(ctx, len(candidates), tuningLoads, func(done, total int) {
		fmt.Fprintf(progress, "%d of %d runs that choose settings\n", done, total)
	}, func(ctx context.Context, i int, seed uint64) (report.Sample, error) {
		c := candidates[i]
		return c.serve(ctx, c.law, mixed.Served(tuningSeed, int(seed)-1, c.law))
	})
	if err != nil {
		return err
	}
	type sides struct{ alone, behind []tried }
	of := map[*judged]*sides{}
	for i, c := range candidates {
		if of[c.judged] == nil {
			of[c.judged] = &sides{}
		}
		into := &of[c.judged].alone
		if c.behind {
			into = &of[c.judged].behind
		}
		*into = append(*into, tried{c.side, geometric(got[i], report.TokensPerS), geometric(got[i], report.TTFTMean)})
	}
	anyTTFT := math.Inf(1)
	for j, s := range of {
		theirs, ours := best(s.alone, anyTTFT), best(s.behind, anyTTFT)
		pair := func(s setting) match { return match{side{s, false}, side{s, true}} }
		j.plan = plan{
			started:  pair(asStarted(j.law)),
			atTheirs: match{theirs.side, best(s.behind, theirs.ttft).side},
			atOurs:   match{best(s.alone, ours.ttft).side, ours.side},
			small:    pair(setting{budget: smallBudget, every: 1}),
		}
	}
	return nil
}

func geometric(samples []report.Sample, m report.Metric) float64 {
	sum := 0.0
	for _, s := range samples {
		sum += math.Log(s[m]) / float64(len(samples))
	}
	return math.Exp(sum)
}

// prefillsToo plays a load to ranks that prefill and decode, so many times as long as such loads
// are, for each match. What two matches have in common is played once.
func prefillsToo(ctx context.Context, seed uint64, number int, e *laws.Entry, times float64, matches ...match) ([]pair, error) {
	l := mixed.Served(seed, number, e)
	l.Stays *= times
	pairs, played := make([]pair, len(matches)), map[side]report.Sample{}
	for i, m := range matches {
		pairs[i] = pair{number: number, load: l}
		for s, into := range map[side]*report.Sample{m.theirs: &pairs[i].theirs, m.ours: &pairs[i].ours} {
			if played[s] == nil {
				got, err := s.serve(ctx, e, l)
				if err != nil {
					return nil, err
				}
				played[s] = got
			}
			*into = played[s]
		}
	}
	return pairs, nil
}
