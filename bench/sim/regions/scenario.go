package regions

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"evenkeel/internal/spelling"
)

// Scenario is what runs: regions, how far they are apart, what their clients
// do, and what breaks.
type Scenario struct {
	Regions  []Region    `yaml:"-"`
	RTTMs    [][]float64 `yaml:"rtt_ms"` // between regions; on the diagonal between a client and its own dispatcher
	Engine   Engine      `yaml:"engine"`
	WarmS    float64     `yaml:"warm_s"` // not measured
	MeasureS float64     `yaml:"measure_s"`
	ProbeMs  float64     `yaml:"probe_ms"`
	ScrapeMs float64     `yaml:"scrape_ms"`  // of the engines, by their own dispatcher
	USDPerGB float64     `yaml:"usd_per_gb"` // either way
	Faults   []Fault     `yaml:"-"`
}

// Region has replicas, one dispatcher, and clients.
type Region struct {
	Name     string `yaml:"name"`
	Replicas int    `yaml:"replicas"`
	Load     Load   `yaml:",inline"`
}

// Load is what a region's clients do.
type Load struct {
	Kind    Kind    `yaml:"-"`
	Clients int     `yaml:"clients"`
	ThinkMs float64 `yaml:"think_ms"` // between an answer and the next turn

	Turns  float64 `yaml:"turns"`  // conversations: mean
	Prompt float64 `yaml:"prompt"` // median of what a user says, tokens
	Output float64 `yaml:"output"` // median of an answer

	Branches int `yaml:"branches"` // trees
	Depth    int `yaml:"depth"`

	Peak  float64 `yaml:"peak"`  // a day's peak over its trough; 0 or 1: level. Clients is the mean
	Phase float64 `yaml:"phase"` // of the day, 0 to 1
}

// Kind is a sort of program.
type Kind uint8

// The kinds.
const (
	conversation Kind = iota
	treeOfThoughts
)

var kindWords = []string{"multi-turn", "tot"}

func (k Kind) String() string { return kindWords[k] }

// Fault is something that breaks at a time and is whole again later.
type Fault struct {
	Kind   FaultKind
	Region int
	Other  int // partition: from whom
	AtS    float64
	ForS   float64
}

// FaultKind is what breaks.
type FaultKind uint8

// The faults.
const (
	Dies      FaultKind = iota // the dispatcher: what it had is gone
	Partition                  // nothing passes between two regions
	Drains                     // the dispatcher takes no forwards
	Upgrades                   // the dispatcher speaks another major version
)

var faultWords = []string{"dies", "partition", "drains", "version"}

func (k FaultKind) String() string { return faultWords[k] }

func (s *Scenario) warmMs() float64 { return 1000 * s.WarmS }
func (s *Scenario) endMs() float64  { return 1000 * (s.WarmS + s.MeasureS) }

// most is how many clients a region has at its peak.
func (l *Load) most() int {
	if l.Peak <= 1 {
		return l.Clients
	}
	return int(math.Ceil(float64(l.Clients) * (1 + l.swing())))
}

// swing is how far the sinusoid goes from its mean, which peak over trough
// says.
func (l *Load) swing() float64 { return (l.Peak - 1) / (l.Peak + 1) }

// active clients at a time; the measured part is one day.
func (l *Load) active(nowMs float64, s *Scenario) int {
	if l.Peak <= 1 {
		return l.Clients
	}
	day := (nowMs - s.warmMs()) / (1000 * s.MeasureS)
	return int(math.Round(float64(l.Clients) * (1 + l.swing()*math.Sin(2*math.Pi*(day+l.Phase)))))
}

// Peaks are the most clients of all regions at once in a day, and the sum of
// each region's most.
func (s *Scenario) Peaks() (most, sum int) {
	const steps = 1440
	tops := make([]int, len(s.Regions))
	for i := range steps {
		now, all := s.warmMs()+1000*s.MeasureS*float64(i)/steps, 0
		for k := range s.Regions {
			n := s.Regions[k].Load.active(now, s)
			tops[k], all = max(tops[k], n), all+n
		}
		most = max(most, all)
	}
	for _, n := range tops {
		sum += n
	}
	return most, sum
}

// Names lists the scenarios that need no file.
func Names() []string {
	return []string{"multi-turn", "multi-turn-uneven", "tot", "tot-mixed", "skew", "diurnal", "gorgo", "tot-uniform", "one-region", "dies",
		"partition", "drains", "version"}
}

// Presets lists the engines that have a name.
func Presets() []string { return slices.Sorted(maps.Keys(presets)) }

// Named returns the scenario of a name, a load or a fault, on a preset.
func Named(name, preset string) (*Scenario, error) {
	e, ok := presets[preset]
	if !ok {
		return nil, fmt.Errorf("unknown preset %q%s; there are %s", preset, spelling.Hint(preset, Presets()), strings.Join(Presets(), ", "))
	}
	s := &Scenario{
		RTTMs:  [][]float64{{3, 183, 281}, {183, 3, 70}, {281, 70, 3}}, // from A (US-West) to B and C as GORGO has them; the third is ours
		Engine: e, ProbeMs: 500, ScrapeMs: 500, USDPerGB: 0.02, WarmS: 40, MeasureS: 200,
	}
	if s.Engine.StepMs < 30 { // a fast engine answers as much in less time
		s.WarmS, s.MeasureS = 15, 75
	}
	chat := func(clients int) Load { return Load{Clients: clients, Turns: 5, Prompt: said, Output: answered} }
	tot := func(clients, branches int) Load {
		return Load{Kind: treeOfThoughts, Clients: clients, Branches: branches, Depth: 4, Output: 100}
	}
	day := func(clients int, peak, phase float64) Load {
		l := chat(clients)
		l.Peak, l.Phase = peak, phase
		return l
	}
	var loads [3]Load
	replicas := 4
	switch name {
	case "multi-turn", "dies", "partition", "drains", "version":
		loads = [3]Load{chat(80), chat(80), chat(80)}
	case "multi-turn-uneven":
		loads = [3]Load{chat(40), chat(30), chat(30)}
	case "tot":
		loads = [3]Load{tot(40, 2), tot(20, 2), tot(20, 2)}
	case "tot-uniform":
		loads = [3]Load{tot(27, 2), tot(27, 2), tot(27, 2)}
	case "tot-mixed":
		loads = [3]Load{tot(2, 4), tot(20, 2), tot(20, 2)}
	case "skew":
		loads = [3]Load{chat(120), chat(40), chat(40)}
	case "diurnal":
		loads = [3]Load{day(67, 2.9, 0), day(67, 8, 1./3), day(67, 32, 2./3)}
	case "gorgo":
		loads, replicas = [3]Load{chat(4), chat(3), chat(3)}, 1
		s.WarmS, s.MeasureS = 0, 60
	case "one-region":
	default:
		return nil, fmt.Errorf("unknown scenario %q; there are %s, or give a file", name, strings.Join(Names(), ", "))
	}
	if name == "one-region" { // the region in which SkyLB compares push modes
		s.Regions, s.RTTMs = []Region{{Name: "a", Replicas: 4, Load: tot(30, 2)}}, [][]float64{{3}}
		return s, s.Validate()
	}
	for i, l := range loads {
		s.Regions = append(s.Regions, Region{Name: string(rune('a' + i)), Replicas: replicas, Load: l})
	}
	if at := slices.Index(faultWords, name); at >= 0 {
		s.Regions[0].Load.Clients, s.Regions[2].Load.Clients = 120, 40 // so that there are forwards to break
		s.Faults = []Fault{{Kind: FaultKind(at), Region: 1, Other: 0, AtS: s.WarmS + s.MeasureS/4, ForS: s.MeasureS / 4}}
	}
	return s, s.Validate()
}

// Validate says what cannot run.
func (s *Scenario) Validate() error {
	if n := len(s.Regions); n < 1 || n > 16 {
		return fmt.Errorf("%d regions: 1 to 16", n)
	}
	if err := s.Engine.Validate(); err != nil {
		return err
	}
	if !(s.WarmS >= 0) || !(s.MeasureS > 0) || s.WarmS+s.MeasureS > 24*3600 {
		return fmt.Errorf("warm_s %g and measure_s %g: from 0, above 0, and together at most a day", s.WarmS, s.MeasureS)
	}
	if !(s.ProbeMs >= 10 && s.ProbeMs <= 1e5) || !(s.ScrapeMs >= 10 && s.ScrapeMs <= 1e5) {
		return fmt.Errorf("probe_ms %g, scrape_ms %g: at least 10, at most 100000", s.ProbeMs, s.ScrapeMs)
	}
	if !(s.USDPerGB >= 0) || math.IsInf(s.USDPerGB, 0) {
		return fmt.Errorf("usd_per_gb %g: a price from 0", s.USDPerGB)
	}
	if len(s.RTTMs) != len(s.Regions) {
		return fmt.Errorf("rtt_ms has %d rows; want one for each of %d regions", len(s.RTTMs), len(s.Regions))
	}
	total := 0
	for i, row := range s.RTTMs {
		if len(row) != len(s.Regions) {
			return fmt.Errorf("rtt_ms[%d] has %d numbers; want one for each of %d regions", i, len(row), len(s.Regions))
		}
		for k, v := range row {
			if !(v >= 0.1 && v < 1e5) {
				return fmt.Errorf("rtt_ms[%d][%d] is %g; want 0.1 to 100000", i, k, v)
			}
			if v != s.RTTMs[k][i] {
				return fmt.Errorf("rtt_ms[%d][%d] is %g, but rtt_ms[%d][%d] is %g: a round trip has one length", i, k, v, k, i, s.RTTMs[k][i])
			}
		}
	}
	for i := range s.Regions {
		r := &s.Regions[i]
		if r.Replicas < 0 || r.Replicas > 64 {
			return fmt.Errorf("region %s: %d replicas; want 0 to 64", r.Name, r.Replicas)
		}
		total += r.Replicas
		if err := r.Load.validate(); err != nil {
			return fmt.Errorf("region %s: %w", r.Name, err)
		}
	}
	if total == 0 {
		return errors.New("no region has a replica")
	}
	for i, f := range s.Faults {
		if f.Region < 0 || f.Region >= len(s.Regions) || f.Kind == Partition &&
			(f.Other < 0 || f.Other >= len(s.Regions) || f.Other == f.Region) {
			return fmt.Errorf("faults[%d]: a %s needs regions that there are, and two for a partition", i, f.Kind)
		}
		if !(f.AtS >= 0) || !(f.ForS > 0) {
			return fmt.Errorf("faults[%d]: at_s %g, for_s %g: from 0, and above 0", i, f.AtS, f.ForS)
		}
	}
	return nil
}

func (l *Load) validate() error {
	switch {
	case l.Clients < 0 || l.Clients > 10_000:
		return fmt.Errorf("clients %d: 0 to 10000", l.Clients)
	case !(l.Output >= 1 && l.Output <= mostOutput):
		return fmt.Errorf("output %g: a median from 1 to %d", l.Output, mostOutput)
	case l.Kind == conversation && !(l.Turns >= 1 && l.Turns <= mostTurns):
		return fmt.Errorf("turns %g: a mean from 1 to %d", l.Turns, mostTurns)
	case l.Kind == conversation && !(l.Prompt >= 1 && l.Prompt <= mostPrompt/4):
		return fmt.Errorf("prompt %g: a median from 1 to %d", l.Prompt, mostPrompt/4)
	case l.Kind == treeOfThoughts && (l.Branches < 1 || l.Branches > 8 || l.Depth < 1 || l.Depth > 6):
		return fmt.Errorf("branches %d, depth %d: 1 to 8, and 1 to 6", l.Branches, l.Depth)
	case !(l.ThinkMs >= 0 && l.ThinkMs < 1e7):
		return fmt.Errorf("think_ms %g: from 0", l.ThinkMs)
	case !(l.Peak >= 0 && l.Peak <= 1e6):
		return fmt.Errorf("peak %g: peak over trough", l.Peak)
	case !(l.Phase >= 0 && l.Phase <= 1):
		return fmt.Errorf("phase %g: 0 to 1", l.Phase)
	}
	return nil
}
