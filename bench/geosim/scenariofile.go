package geosim

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

// file is what --scenario reads: YAML, or JSON, which is YAML too. What it
// leaves out is as in the scenario it is based on.
type file struct {
	Like     string       `yaml:"like"`
	Preset   string       `yaml:"preset"`
	Regions  []regionFile `yaml:"regions"`
	RTTMs    [][]float64  `yaml:"rtt_ms"`
	Engine   engineFile   `yaml:"engine"`
	WarmS    *float64     `yaml:"warm_s"`
	MeasureS *float64     `yaml:"measure_s"`
	ProbeMs  *float64     `yaml:"probe_ms"`
	ScrapeMs *float64     `yaml:"scrape_ms"`
	USDPerGB *float64     `yaml:"usd_per_gb"`
	Faults   []faultFile  `yaml:"faults"`
}

type engineFile struct {
	TPMs     *float64 `yaml:"tp_ms"`
	T0Ms     *float64 `yaml:"t0_ms"`
	BusyMs   *float64 `yaml:"busy_ms"`
	StepMs   *float64 `yaml:"step_ms"`
	StepPer  *float64 `yaml:"step_per_request_ms"`
	KVTokens *int     `yaml:"kv_tokens"`
	OnePass  *bool    `yaml:"one_pass"`
	Pends    *bool    `yaml:"pending_in_prefill"`
	LogSteps *int     `yaml:"log_steps"`
}

type regionFile struct {
	Name     string   `yaml:"name"`
	Replicas *int     `yaml:"replicas"`
	Workload string   `yaml:"workload"`
	Clients  *int     `yaml:"clients"`
	ThinkMs  *float64 `yaml:"think_ms"`
	Turns    *float64 `yaml:"turns"`
	Prompt   *float64 `yaml:"prompt"`
	Output   *float64 `yaml:"output"`
	Branches *int     `yaml:"branches"`
	Depth    *int     `yaml:"depth"`
	Peak     *float64 `yaml:"peak"`
	Phase    *float64 `yaml:"phase"`
}

type faultFile struct {
	Kind   string   `yaml:"kind"`
	Region string   `yaml:"region"`
	From   string   `yaml:"from"`
	AtS    *float64 `yaml:"at_s"`
	ForS   *float64 `yaml:"for_s"`
}

// Read returns the scenario of a name or of a file. A preset, unless it is
// empty, goes before the file's.
func Read(nameOrPath, preset string) (*Scenario, error) {
	if slices.Contains(Names(), nameOrPath) {
		if preset == "" {
			preset = "l4-llama8b"
		}
		return Named(nameOrPath, preset)
	}
	text, err := os.ReadFile(nameOrPath)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("scenario %q: there are %s, and no such file", nameOrPath, strings.Join(Names(), ", "))
	}
	if err != nil {
		return nil, fmt.Errorf("scenario: %w", err)
	}
	s, err := ParseScenario(text, preset)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", nameOrPath, err)
	}
	return s, nil
}

// ParseScenario reads a scenario from YAML or JSON. Keys it does not know are
// refused, with line and column.
func ParseScenario(text []byte, preset string) (s *Scenario, err error) {
	defer func() { // goccy/go-yaml 1.19.2 panics on some input
		if r := recover(); r != nil {
			s, err = nil, fmt.Errorf("not readable as YAML (%v)", r)
		}
	}()
	var in file
	if err := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(&in); err != nil {
		return nil, fmt.Errorf("not a scenario: %s", strings.TrimSpace(yaml.FormatError(err, false, true)))
	}
	if preset == "" {
		if preset = in.Preset; preset == "" {
			preset = "l4-llama8b"
		}
	}
	if in.Like == "" {
		in.Like = "multi-turn"
	}
	if s, err = Named(in.Like, preset); err != nil {
		return nil, err
	}
	s.Name = "file"
	if err := in.into(s); err != nil {
		return nil, err
	}
	return s, s.Validate()
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

func (in *file) into(s *Scenario) error {
	set(&s.Engine.TPMs, in.Engine.TPMs)
	set(&s.Engine.T0Ms, in.Engine.T0Ms)
	set(&s.Engine.BusyMs, in.Engine.BusyMs)
	set(&s.Engine.StepMs, in.Engine.StepMs)
	set(&s.Engine.StepPer, in.Engine.StepPer)
	set(&s.Engine.KVTokens, in.Engine.KVTokens)
	set(&s.Engine.OnePass, in.Engine.OnePass)
	set(&s.Engine.PrefillPends, in.Engine.Pends)
	set(&s.Engine.LogSteps, in.Engine.LogSteps)
	set(&s.WarmS, in.WarmS)
	set(&s.MeasureS, in.MeasureS)
	set(&s.ProbeMs, in.ProbeMs)
	set(&s.ScrapeMs, in.ScrapeMs)
	set(&s.USDPerGB, in.USDPerGB)
	if in.RTTMs != nil {
		s.RTTMs = in.RTTMs
	}
	if in.Regions != nil {
		like := s.Regions
		s.Regions = nil
		for i := range in.Regions {
			r, err := in.Regions[i].region(like[min(i, len(like)-1)], i)
			if err != nil {
				return err
			}
			if s.region(r.Name) >= 0 {
				return fmt.Errorf("regions[%d]: there are two %q", i, r.Name)
			}
			s.Regions = append(s.Regions, r)
		}
	}
	for i := range in.Faults {
		f, err := in.Faults[i].fault(s)
		if err != nil {
			return fmt.Errorf("faults[%d]: %w", i, err)
		}
		s.Faults = append(s.Faults, f)
	}
	return nil
}

func (s *Scenario) region(name string) int {
	return slices.IndexFunc(s.Regions, func(r Region) bool { return r.Name == name })
}

func (f *regionFile) region(like Region, i int) (Region, error) {
	r := like
	if f.Name != "" {
		r.Name = f.Name
	}
	set(&r.Replicas, f.Replicas)
	if f.Workload != "" {
		at := slices.Index(kindWords, f.Workload)
		if at < 0 {
			return r, fmt.Errorf("regions[%d]: workload %q; there are %s", i, f.Workload, strings.Join(kindWords, ", "))
		}
		if r.Load.Kind = Kind(at); r.Load.Kind == treeOfThoughts && r.Load.Branches == 0 {
			r.Load.Branches, r.Load.Depth, r.Load.Output = 2, 4, 100
		} else if r.Load.Kind == conversation && r.Load.Turns == 0 {
			r.Load.Turns, r.Load.Prompt, r.Load.Output = 5, said, answered
		}
	}
	set(&r.Load.Clients, f.Clients)
	set(&r.Load.ThinkMs, f.ThinkMs)
	set(&r.Load.Turns, f.Turns)
	set(&r.Load.Prompt, f.Prompt)
	set(&r.Load.Output, f.Output)
	set(&r.Load.Branches, f.Branches)
	set(&r.Load.Depth, f.Depth)
	set(&r.Load.Peak, f.Peak)
	set(&r.Load.Phase, f.Phase)
	return r, nil
}

func (f *faultFile) fault(s *Scenario) (Fault, error) {
	at := slices.Index(faultWords, f.Kind)
	if at < 0 {
		return Fault{}, fmt.Errorf("kind %q; there are %s", f.Kind, strings.Join(faultWords, ", "))
	}
	out := Fault{Kind: FaultKind(at), Region: s.region(f.Region), Other: s.region(f.From), AtS: s.WarmS, ForS: s.MeasureS / 2}
	if out.Region < 0 {
		return out, fmt.Errorf("region %q: no such region", f.Region)
	}
	if out.Kind == Partition && out.Other < 0 {
		return out, fmt.Errorf("from %q: no such region", f.From)
	}
	set(&out.AtS, f.AtS)
	set(&out.ForS, f.ForS)
	return out, nil
}
