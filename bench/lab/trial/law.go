package trial

import (
	"math"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/bench/lab/survey"
	"evenkeel/dispatcher/step"
)

// Learned is the law that evenkeel learned from the times of tokens.
type Learned struct {
	Way       string  `json:"requests_of"` // step.Way
	C0Ms      float64 `json:"c0_ms"`
	C1Ms      float64 `json:"c1_ms"`
	RequestMs float64 `json:"request_ms"`
	OwnMs     float64 `json:"own_prefill_ms"`
	SharedMs  float64 `json:"shared_prefill_ms"`
	PrefillMs float64 `json:"prefill_step_ms"`
	Steps     uint64  `json:"steps"`
	R2        float64 `json:"r2"`
	Error     float64 `json:"error"` // beside the steps that were seen; 0: none were
}

// Law is what is known of how long steps take.
type Law struct {
	Learned *Learned `json:"learned,omitempty"`     // nil: nothing was learned
	Seen    int      `json:"seen_windows"`          // stretches of time in which the engine's page of metrics told how long steps are
	Unread  bool     `json:"page_unread,omitempty"` // that page could not be read
	Nearest *Near    `json:"nearest,omitempty"`     // nil: nothing was seen, or the table has no such ranks
	Barrier *Counted `json:"barrier,omitempty"`     // nil: the engine counts nothing of it

	Detail string `json:"-"` // why the page could not be read, for people at this machine
}

// Counted is what SGLang counted itself of how its ranks wait for each other, both ways together (survey.Barrier).
type Counted struct {
	Steps  float64 `json:"steps"`
	WaitMs float64 `json:"wait_ms"`      // of a rank in a step, before its forward pass
	Beyond float64 `json:"pairs_beyond"` // attention that the rank with most computed beyond the others, as a share of all
}

// Near is the law of the table that is nearest to the steps that were seen.
type Near struct {
	Name  string  `json:"name"`
	Form  string  `json:"form"`
	Error float64 `json:"error"` // mean of the errors, as a share of the steps
	Among int     `json:"among"` // laws
	Same  bool    `json:"same_model"`
}

// Far is the mean error above which the nearest law is no law of these engines.
const Far = 0.2

// Explain compares what was learned, and the laws of the table, with the steps that the engine's page told of.
func Explain(e *Engine, learned *Learned, all []*survey.Series) (l Law) {
	if learned != nil {
		m := *learned
		l.Learned = &m
	}
	const usual = 8192
	chunk := e.Budget
	if chunk == 0 {
		chunk = usual
	}
	windows := survey.Windows(all, float64(chunk))
	l.Seen = len(windows)
	if b := survey.Counted(all); b.Steps > 0 {
		l.Barrier = &Counted{Steps: b.Steps, WaitMs: b.WaitedMs / b.Steps, Beyond: b.FewerPairs / max(1, b.Pairs)}
	}
	if len(windows) == 0 {
		var why error
		if l.Unread, why = survey.Unread(all); l.Unread {
			l.Detail = why.Error()
		}
		return l
	}
	if m := l.Learned; m != nil && m.C0Ms > 0 {
		m := step.Model{C0Ms: m.C0Ms, C1Ms: m.C1Ms, RequestMs: m.RequestMs, OwnMs: m.OwnMs, SharedMs: m.SharedMs, PrefillMs: m.PrefillMs}
		l.Learned.Error = off(&step.Law{Model: m}, windows)
	}
	among, same := candidates(e)
	for i := range among {
		law := among[i].Law()
		if err := off(&law, windows); l.Nearest == nil || err < l.Nearest.Error {
			l.Nearest = &Near{Name: among[i].Name(), Form: law.Form.String(), Error: err, Among: len(among), Same: same}
		}
	}
	return l
}

// candidates are the laws of as many ranks of this engine, of the model if the table has it.
func candidates(e *Engine) (all []laws.Entry, same bool) {
	all, _ = Find("", e) // no name is no error
	var of []laws.Entry
	for i := range all {
		if model, _, _ := strings.Cut(all[i].Name(), ","); strings.EqualFold(model, e.Model) {
			of = append(of, all[i])
		}
	}
	if len(of) > 0 {
		return of, true
	}
	return all, false
}

// off is the mean error of a law over the steps of some windows.
func off(law *step.Law, windows []survey.Window) float64 {
	sum, steps := 0.0, 0.0
	for i := range windows {
		w := &windows[i]
		decoding := make([]step.Rank, len(w.Ranks))
		for k, r := range w.Ranks {
			decoding[k] = step.Rank{Requests: r.Requests, KV: r.KV}
		}
		ms := (1-w.Prompting)*law.Ms(decoding) + w.Prompting*law.Ms(w.Ranks)
		sum += w.Steps * math.Abs(ms/w.StepMs-1)
		steps += w.Steps
	}
	return sum / steps
}
