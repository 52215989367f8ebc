package fit

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"

	"evenkeel/internal/stats"
	"evenkeel/predictor"
)

// When a prefill line is used.
const (
	minProbes   = 20
	minPrefillR = 0.5
	minSpread   = 2.0 // largest over smallest prompt
)

// TTFT is prefill time over uncached prompt tokens, milliseconds = a + b*tokens.
type TTFT struct {
	Fits    []PrefillFit `json:"fits"`
	LeftOut ProbesLeft   `json:"left_out"`
	Notes   []string     `json:"notes,omitempty"`
	Config  string       `json:"config,omitempty"` // lines for serve's config file, where a fit may be used
}

// PrefillFit is the line of one engine, or of all engines of a model.
type PrefillFit struct {
	Model     string           `json:"model"`
	Prefill   string           `json:"prefill"` // engine, "all" for all of the model's
	N         int              `json:"n"`
	A         predictor.Figure `json:"a_ms"`
	B         predictor.Figure `json:"b_ms_per_token"`
	R2        predictor.Figure `json:"r2"`
	MinTokens int              `json:"min_tokens"`
	MaxTokens int              `json:"max_tokens"`
	Refused   string           `json:"refused,omitempty"` // why not to use it
}

// ProbesLeft counts the lines that say nothing about a prefill alone on its engine.
type ProbesLeft struct {
	NoProbe int `json:"no_probe"` // none was answered
	Shared  int `json:"shared"`   // others were on the engine (probe_bs > 0)
	Several int `json:"several"`  // the time of several attempts or legs, added up
}

const allEngines = "all"

// PrefillLines fits every engine of every model, and each model's engines together.
func PrefillLines(log *RequestLog) (*TTFT, error) {
	t := &TTFT{}
	if log.Cut {
		t.Notes = append(t.Notes, cutNote)
	}
	type place struct{ model, engine string }
	probes := map[place][]stats.Point{}
	for _, r := range log.Requests {
		switch {
		case r.Prefill == "" || r.ProbeMs == 0 || r.Prompt == 0:
			t.LeftOut.NoProbe++
		case r.Attempts > 1:
			t.LeftOut.Several++
		case r.ProbeBS > 0:
			t.LeftOut.Shared++
		default:
			p := stats.Point{X: float64(max(0, r.Prompt-r.Cached)), Y: r.ProbeMs}
			probes[place{r.Model, r.Prefill}] = append(probes[place{r.Model, r.Prefill}], p)
		}
	}
	if len(probes) == 0 {
		return nil, fmt.Errorf("no probe was alone on its engine: of %d lines %d have no probe, %d shared the engine (probe_bs > 0), %d add "+
			"several attempts up; take a log "+
			"of a quieter time",
			len(log.Requests), t.LeftOut.NoProbe, t.LeftOut.Shared, t.LeftOut.Several)
	}
	for _, model := range models(log.Requests) {
		engines := map[string][]stats.Point{}
		var all []stats.Point
		for at, points := range probes {
			if at.model == model {
				engines[at.engine] = points
			}
		}
		for _, engine := range slices.Sorted(maps.Keys(engines)) {
			t.Fits = append(t.Fits, prefillFit(model, engine, engines[engine]))
			all = append(all, engines[engine]...)
		}
		if len(all) == 0 {
			continue
		}
		together := prefillFit(model, allEngines, all)
		t.Fits = append(t.Fits, together)
		if together.Refused == "" {
			t.Config += fmt.Sprintf("# %s, %d probes, R2 %.3f\nprefill:\n  calibration: {tp_ms: %.4g, t0_ms: %.2f}\n",
				model, together.N, float64(together.R2), float64(together.B), float64(together.A))
		}
	}
	return t, nil
}

func prefillFit(model, engine string, probes []stats.Point) PrefillFit {
	l := stats.LeastSquares(probes)
	f := PrefillFit{Model: model, Prefill: engine, N: l.N, A: predictor.Figure(l.Intercept), B: predictor.Figure(l.Slope),
		R2:        predictor.Figure(l.R2),
		MinTokens: int(l.MinX), MaxTokens: int(l.MaxX)}
	switch {
	case l.N < minProbes:
		f.Refused = fmt.Sprintf("%d probes; %d are needed", l.N, minProbes)
	case l.MaxX < minSpread*l.MinX:
		f.Refused = fmt.Sprintf("prompts of %.0f to %.0f tokens; the longest must have twice the tokens of the shortest", l.MinX, l.MaxX)
	case l.Slope <= 0:
		f.Refused = fmt.Sprintf("b = %.4g ms a token: longer prompts were not slower", l.Slope)
	case l.Intercept < 0:
		f.Refused = fmt.Sprintf("a = %.2f ms: an empty prompt would take less than no time; time does not grow along a line here", l.Intercept)
	case l.R2 < minPrefillR:
		f.Refused = fmt.Sprintf("R2 = %.3f; below %.1f prompt length does not explain the time", l.R2, minPrefillR)
	}
	return f
}

// WriteText prints the table, why lines are refused, and config lines.
func (t *TTFT) WriteText(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "model\tprefill\tn\ta ms\tb ms/token\tR2\ttokens\t")
	for _, f := range t.Fits {
		fmt.Fprintf(w, "%s\t%s\t%d\t%.2f\t%.5f\t%.4f\t%d-%d\t\n", f.Model, f.Prefill, f.N, float64(f.A), float64(f.B), float64(f.R2), f.MinTokens,
			f.MaxTokens)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, f := range t.Fits {
		if f.Refused != "" {
			fmt.Fprintf(out, "%s on %s: not used: %s\n", f.Model, f.Prefill, f.Refused)
		}
	}
	fmt.Fprintf(out, "left out: %d lines without a probe, %d probes that shared their engine, %d of several attempts\n", t.LeftOut.NoProbe,
		t.LeftOut.Shared,
		t.LeftOut.Several)
	writeNotes(out, t.Notes)
	writeConfig(out, t.Config)
	return nil
}

func writeNotes(out io.Writer, notes []string) {
	for _, n := range notes {
		fmt.Fprintln(out, "note:", n)
	}
}

func writeConfig(out io.Writer, config string) {
	if config != "" {
		fmt.Fprintf(out, "\nfor the config file:\n\n%s", config)
	}
}
