package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"evenkeel/gateway/config"
	"evenkeel/prefill"
	"evenkeel/prefill/policy"
)

// fixtureCase is one test case of a fixture, which is a file with a list of cases. A case describes
// some prefill engines, and says which of them a policy should choose for a request.
type fixtureCase struct {
	Name       string             `json:"name"`
	Policy     string             `json:"policy"` // policy to test; empty: the policy of the config
	Request    fixtureRequest     `json:"request"`
	Candidates []fixtureCandidate `json:"candidates"`
	Want       string             `json:"want"` // id of the candidate that the policy should choose
}

type fixtureRequest struct {
	ID           string  `json:"id"`
	Session      string  `json:"session"`
	PromptTokens float64 `json:"prompt_tokens"`
	Last         string  `json:"last"` // id of the candidate that round-robin chose last
}

// fixtureCandidate has the id of a prefill engine and numbers about it. The keys of the numbers are
// the variables of policy expressions, and the keys of extraNumbers.
type fixtureCandidate map[string]any

// extraNumbers are the numbers that a candidate may have although policy expressions have no
// variables for them.
var extraNumbers = map[string]func(*policy.Engine) *float64{
	"block_tokens":     func(e *policy.Engine) *float64 { return &e.BlockTokens },
	"beta2_ms":         func(e *policy.Engine) *float64 { return &e.Beta2 },
	"queued_attention": func(e *policy.Engine) *float64 { return &e.QueuedAttention },
	"active_work":      func(e *policy.Engine) *float64 { return &e.ActiveWork },
	"kv_work":          func(e *policy.Engine) *float64 { return &e.KVWork },
}

// matchedKey is the key of how many prompt tokens the candidate has in its prefix cache. Only whole
// blocks of them count as a hit.
const matchedKey = "matched_tokens"

// verdict is the result of a case: whether the policy chose the wanted candidate.
type verdict struct {
	Name   string       `json:"name"`
	Policy string       `json:"policy"`
	OK     bool         `json:"ok"`
	Chosen string       `json:"chosen"`
	Want   string       `json:"want"`
	Scores []policy.Row `json:"scores"`
}

// String returns the line that is printed for a case. If the policy chose another candidate than
// the case wants, the line has all scores.
func (v verdict) String() string {
	if v.OK {
		return fmt.Sprintf("ok   %s: %s chooses %s", v.Name, v.Policy, v.Chosen)
	}
	var scores []string
	for _, r := range v.Scores {
		score := "none"
		if r.Score != nil {
			score = fmt.Sprintf("%.6g", *r.Score)
		}
		scores = append(scores, r.Candidate+" "+score)
	}
	return fmt.Sprintf("FAIL %s: %s chooses %s, not %s; scores: %s", v.Name, v.Policy, v.Chosen, v.Want, strings.Join(scores, ", "))
}

// runFixture tests the policies of a config on the cases of a file.
func runFixture(file string, cfg *config.Config) ([]verdict, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var cases []fixtureCase
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&cases); err != nil {
		return nil, fmt.Errorf("%s: not a list of cases: %w; configs/prefill-cases.json is one", file, err)
	}
	library, err := policy.NewLibrary(cfg.Prefill.Policies)
	if err != nil {
		return nil, err
	}
	all := make([]verdict, 0, len(cases))
	for i, c := range cases {
		v, err := c.decide(library, cfg)
		if err != nil {
			return nil, fmt.Errorf("%s: case %d (%s): %w", file, i+1, c.Name, err)
		}
		all = append(all, v)
	}
	return all, nil
}

// decide lets the policy choose among the candidates of the case. It fails if the case itself is
// invalid.
func (f *fixtureCase) decide(library *policy.Library, cfg *config.Config) (verdict, error) {
	p, err := library.Parse(cmp.Or(f.Policy, cfg.Prefill.Policy))
	switch {
	case err != nil:
		return verdict{}, err
	case len(f.Candidates) == 0:
		return verdict{}, fmt.Errorf("there are no candidates; list at least one")
	case !(f.Request.PromptTokens >= 1): // in this form, NaN is refused as well
		return verdict{}, fmt.Errorf("request.prompt_tokens is %v; write the length of a prompt", f.Request.PromptTokens)
	}
	query := policy.Query{ID: f.Request.ID, Cursor: -1} // -1: round-robin has not chosen yet
	if f.Request.Session != "" {
		query.Key = xxhash.Sum64String(f.Request.Session)
	}
	view := make([]policy.Engine, len(f.Candidates))
	wantExists := false
	for i, given := range f.Candidates {
		if err := given.setIndicators(&view[i], f.Request.PromptTokens, cfg); err != nil {
			return verdict{}, err
		}
		view[i].Order = i
		if view[i].ID == f.Request.Last {
			query.Cursor = i
		}
		wantExists = wantExists || view[i].ID == f.Want
	}
	if !wantExists {
		return verdict{}, fmt.Errorf("want is %q; name one of the candidates", f.Want)
	}
	policy.Aggregate(view) // sets the indicators that compare all candidates, such as max_bs
	choice := p.Choose(&query, view)
	chosen := view[choice.Index].ID
	return verdict{
		Name: f.Name, Policy: p.String(), OK: chosen == f.Want, Chosen: chosen, Want: f.Want,
		Scores: p.Explain(view, choice.Index, len(view)),
	}, nil
}

// setIndicators sets the indicators of a candidate, the values from which a policy chooses. An
// indicator that the case does not give has the value of an idle engine with the prefill times of
// the config. A case may give three kinds of numbers: indicators, which are variables of policy
// expressions; extraNumbers, for which expressions have no variables; and the prompt tokens in the
// prefix cache, from which SetPrompt computes further indicators.
func (f fixtureCandidate) setIndicators(c *policy.Engine, prompt float64, cfg *config.Config) error {
	id, _ := f["id"].(string)
	if id == "" {
		return fmt.Errorf("a candidate has no id")
	}
	latency := prefill.Default().Calibration.InitialLatency() // used if the config has no times of its own
	if cfg.Prefill.Calibration.TPMs > 0 {
		latency = cfg.Prefill.Calibration.InitialLatency()
	}
	c.ID, c.Ring, c.BlockTokens = id, policy.Vnodes(id), 16             // 16 tokens per block, unless the case says otherwise
	c.TPMs, c.T0Ms, c.Beta2 = latency.TPMs, latency.T0Ms, latency.Beta2 // coefficients of the time that the engine takes for a prompt
	cached := 0.0                                                       // prompt tokens in the candidate's prefix cache
	indicators := indicatorsOf(&c.Indicators)
	for _, key := range slices.Sorted(maps.Keys(f)) {
		if key == "id" {
			continue
		}
		n, ok := f[key].(float64)
		if !ok || math.IsNaN(n) {
			return fmt.Errorf("candidate %s: %s is no number", id, key)
		}
		switch {
		case key == matchedKey:
			cached = n
		case extraNumbers[key] != nil:
			*extraNumbers[key](c) = n
		case indicators[key] != nil:
			*indicators[key] = n
		default:
			names := slices.Sorted(maps.Keys(indicators))
			return fmt.Errorf("candidate %s: no value is called %q; there are %s, %s, %s", id, key,
				matchedKey, strings.Join(names, ", "), strings.Join(slices.Sorted(maps.Keys(extraNumbers)), ", "))
		}
	}
	c.SetPrompt(prompt, cached)
	return nil
}

// derivedIndicators are the indicators that are computed from other indicators and the prompt, so
// that a case cannot give them.
var derivedIndicators = []string{"prompt_tokens", "hit_tokens", "hit_ratio", "new_tokens", "p_tokens", "max_bs", "min_bs", "mean_bs", "n"}

// indicatorsOf returns the indicators in i that a case may give, by name.
func indicatorsOf(i *policy.Indicators) map[string]*float64 {
	all, v := map[string]*float64{}, reflect.ValueOf(i).Elem()
	for field := range v.NumField() {
		name := v.Type().Field(field).Tag.Get("expr")
		p, isNumber := v.Field(field).Addr().Interface().(*float64)
		if isNumber && !slices.Contains(derivedIndicators, name) {
			all[name] = p
		}
	}
	return all
}
