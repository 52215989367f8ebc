package refengine

import "slices"

// variants are faults beyond their plain form, which some do not have.
var variants = map[Fault][]Rule{
	Hang: {{Phase: PhaseAfterHeaders}, {Phase: PhaseMidStream, AfterTokens: 4}},
	Reset: {{Phase: PhaseAccept}, {Phase: PhaseAfterHeaders}, {Phase: PhaseMidStream, AfterTokens: 4},
		{Phase: PhaseInsideChunk, AfterTokens: 4}},
	Reject:        {{Cleanup: true}},
	Busy:          {{Cleanup: true, RetryAfter: 1}},
	Internal:      {{Cleanup: true}, {Shape: ShapeText, Cleanup: true}},
	Status:        {{Value: 502}, {Value: 504}, {Value: 501}, {Value: 422}},
	ErrorEvent:    {{AfterTokens: 3}, {Shape: ShapeOld}, {Shape: ShapeRust}},
	Error200:      {{Shape: ShapeOld}, {Shape: ShapeRust}},
	SilentEnd:     {{AfterTokens: 3}},
	MissingFinish: {{Role: true}, {AfterTokens: 3}},
	FinishError:   {{AfterTokens: 3}},
	Recomputed:    {{AfterTokens: 3}, {AfterTokens: 3, Text: true}},
	Slow:          {{DelayMS: 5}},
	Swallow:       {{AfterTokens: 2, Tokens: 3}},
	FrozenGauges:  {{Value: 0.97}},
	SlowPages:     {{DelayMS: 2000}},
	CallbackLate:  {{DelayMS: 300}, {DelayMS: 3000}},
	BootstrapSlow: {{DelayMS: 300}, {DelayMS: 3000}},
}

// Forms are the ways to try a fault, the plain one first if it is one.
func (f Fault) Forms() (forms []Rule) {
	for _, r := range append([]Rule{{}}, variants[f]...) {
		if r.Fault = f; r.Validate() == nil {
			forms = append(forms, r)
		}
	}
	return forms
}

// harmless are the faults of which a client of a proxy must notice nothing.
var harmless = []Fault{MissingDone, FrozenGauges, SlowPages, Slow, Swallow, Comments, CRLF, SplitBytes, UsageAlways, EOSFirst}

// Harmless says whether a client of a proxy must notice nothing of the fault.
func (f Fault) Harmless() bool { return slices.Contains(harmless, f) }
