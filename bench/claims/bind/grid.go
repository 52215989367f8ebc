package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/decode"
	"evenkeel/dispatcher/board"
)

// part is a grid of scenarios, each with prefills of several lengths.
type part struct {
	traces       []string
	ranks, slots []int
	loads        []string // closed, or a share
	steps        []float64
	seeds        int
	requests     int // of a seed; 0: as many as the fleet needs
}

// usual is what is run unless flags say otherwise: few ranks with everything, many ranks with what
// shows whether they are another matter.
var usual = []part{
	{
		[]string{"mooncake", "azure", "synth:code", "synth:lognormal", "synth:pareto"}, []int{8}, []int{16}, []string{closed, "0.9", "0.7"},
		[]float64{0, 1, 3, 10, 30, 100}, 3, 3000,
	},
	{[]string{"azure", "synth:lognormal"}, []int{64}, []int{32}, []string{closed, "0.9"}, []float64{0, 1, 10, 100}, 1, 12_000},
}

const window = board.DefaultWindow

// arm is a policy that is bound in one way.
type arm struct {
	name, policy string
	load         decode.Load // of it AtArrival and Ahead
}

func (a *arm) late() bool { return !a.load.AtArrival }

var arrival = decode.Load{AtArrival: true}

var arms = []arm{
	lateKV:       {name: "late, `jsq-kv`", policy: "jsq-kv"},
	lateNow:      {name: "late, `evenkeel`", policy: "evenkeel"},
	arrivalKV:    {name: "arrival, `jsq-kv`", policy: "jsq-kv", load: arrival},
	arrivalNow:   {name: "arrival, `evenkeel`", policy: "evenkeel", load: arrival},
	arrivalAhead: {name: "arrival, `evenkeel`, slots ahead", policy: "evenkeel", load: decode.Load{AtArrival: true, Ahead: board.AheadAuto}},
}

// Indices of arms, in the order in which tables show them.
const (
	lateKV = iota
	lateNow
	arrivalKV
	arrivalNow
	arrivalAhead
)

func armOf(name string) *arm {
	return &arms[slices.IndexFunc(arms, func(a arm) bool { return a.name == name })]
}

// scenario is requests for a fleet.
type scenario struct {
	trace           string
	ranks, slots    int
	load            string
	steps           []float64
	seeds, requests int
}

const closed = "closed"

// rho is the share of a load, 0 for the closed loop.
func rho(load string) (float64, error) {
	if load == closed {
		return 0, nil
	}
	return strconv.ParseFloat(load, 64)
}

// scenarios are those of all parts.
func (o options) scenarios() (all []*scenario) {
	for _, p := range o.parts {
		for _, load := range p.loads {
			for _, ranks := range p.ranks {
				for _, slots := range p.slots {
					for _, name := range p.traces {
						all = append(all, &scenario{
							trace: name, ranks: ranks, slots: slots, load: load, steps: p.steps, seeds: p.seeds, requests: p.requests,
						})
					}
				}
			}
		}
	}
	return all
}

// cell is the run of an arm with prefills of a length; its seed is still to be set. In a closed
// loop those that are bound late are prefilled already, whatever it takes. Without a prefill,
// binding at arrival is binding late: a test of bench/sim/decode holds it to the bit.
func (s *scenario) cell(steps float64, arm int) cell {
	if arms[arm].late() && s.load == closed {
		steps = 0
	}
	return cell{
		Trace: s.trace, Ranks: s.ranks, Slots: s.slots, Load: s.load, Seeds: s.seeds, Requests: s.requests, Steps: steps, Arm: arms[arm].name,
	}
}

// runs says whether the arm is run with prefills of that length.
func runs(steps float64, arm int) bool { return steps > 0 || arms[arm].late() }

// cells are all runs, in the order in which they are run: whoever ends them early has all of the
// first seed before the second.
func (o options) cells() (all []cell) {
	seen := map[cell]bool{}
	most := 0
	for _, p := range o.parts {
		most = max(most, p.seeds)
	}
	add := func(c cell, seed int) {
		if c.Seed = seed; !seen[c] && seed <= c.Seeds {
			seen[c] = true
			all = append(all, c)
		}
	}
	for seed := 1; seed <= most; seed++ {
		for _, s := range o.scenarios() {
			add(s.cell(0, lateNow), seed)
			for _, steps := range s.steps {
				for i := range arms {
					if runs(steps, i) {
						add(s.cell(steps, i), seed)
					}
				}
			}
		}
	}
	return all
}

// requests are those of a trace, and how long their prompts and answers are in the mean.
type requests struct {
	decode.Source
	prompt, output float64
}

// sources are those that were asked for.
var sources = map[string]requests{}

// source is the requests of a name.
func source(name string) (of requests, err error) {
	if of, ok := sources[name]; ok {
		return of, nil
	}
	var t *trace.Trace
	switch synth, drawn := strings.CutPrefix(name, trace.SynthPrefix); {
	case drawn:
		if t, err = trace.Synth(synth, 12_000, 1); err != nil {
			return of, err
		}
		of.Synth = synth
	case name == "mooncake":
		t = trace.Mooncake()
		of.Trace = t
	case name == "azure":
		t = trace.Azure()
		of.Trace = t
	default:
		return of, fmt.Errorf("no trace %q; there are mooncake, azure and %sNAME", name, trace.SynthPrefix)
	}
	n := float64(cmp.Or(len(t.Requests), 1))
	for i := range t.Requests {
		of.prompt += float64(t.Requests[i].Prompt) / n
		of.output += float64(t.Requests[i].Output) / n
	}
	sources[name] = of
	return of, nil
}
