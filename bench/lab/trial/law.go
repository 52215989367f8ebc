package trial

import (
	"evenkeel/bench/lab/survey"
	"evenkeel/dispatcher/step"
)

// Learned is the law that evenkeel learned from the times of tokens.
type Learned struct {
	Way       string  `json:"requests_of"` // step.Bottleneck
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
	Learned *Learned     `json:"learned,omitempty"`     // nil: nothing was learned
	Seen    int          `json:"seen_windows"`          // stretches of time in which the engine's page of metrics told how long steps are
	Unread  bool         `json:"page_unread,omitempty"` // that page could not be read
	Nearest *survey.Near `json:"nearest,omitempty"`     // nil: nothing was seen, or the table has no such ranks
	Barrier *Counted     `json:"barrier,omitempty"`     // nil: the engine counts nothing of it

	Detail string `json:"-"` // why the page could not be read, for people at this machine
}

// Counted is what SGLang counted itself of how its ranks wait for each other, both ways together
// (survey.Barrier).
type Counted struct {
	Steps  float64 `json:"steps"`
	WaitMs float64 `json:"wait_ms"`      // of a rank in a step, before its forward pass
	Beyond float64 `json:"pairs_beyond"` // attention that the rank with most computed beyond the others, as a share of all
}

// Explain compares what was learned, and the laws of the table, with the steps that the engine's
// page told of.
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
		m := step.Model{C0Ms: m.C0Ms, C1Ms: m.C1Ms, RequestMs: m.RequestMs, OwnPromptMs: m.OwnMs, SharedPromptMs: m.SharedMs,
			PrefillMs: m.PrefillMs}
		l.Learned.Error = survey.Off(&step.Law{Model: m}, windows)
	}
	l.Nearest = survey.Nearest(e.Kind, e.Model, e.Ranks, windows)
	return l
}
