// Package verdict has the form in which users see what the twin found of a group.
package verdict

import (
	"fmt"
	"math"
)

// Policies are those that the twin replays; the config file may also say Off.
type Policies []string

// Off in the config file in place of a list stands for an empty list.
const Off = "off"

// UnmarshalYAML reads a list of policies, or off.
func (t *Policies) UnmarshalYAML(read func(any) error) error {
	var list []string
	if err := read(&list); err != nil {
		var word string
		if read(&word) != nil || word != Off {
			return err
		}
	}
	*t = list
	return nil
}

// Twin is what the last minutes of a group would have been under other policies.
type Twin struct {
	AgeSeconds    float64   `json:"age_seconds"`    // since the end of the window that was replayed
	WindowSeconds float64   `json:"window_seconds"` // length of that window, without its start, which only fills the ranks
	Policy        string    `json:"policy"`         // in force at the end of the window
	StepMs        float64   `json:"step_ms"`        // mean of the steps that the engines made in the window, over all groups of the model: which of them gets a request is up to the policy
	TwinStepMs    float64   `json:"twin_step_ms"`   // mean step of the window as it is replayed under the policy in force
	ErrorRatio    float64   `json:"error_ratio"`    // share of a step by which that replay may be wrong: twice the deviation of the last windows, or the deviation of this one if it is larger
	Replays       int       `json:"replays"`        // how many of each policy were made; the figures are their means
	Against       []Against `json:"against"`        // one for each other policy of dispatch.twin
}

// Against compares the policy in force with one that the twin replayed the same minutes under.
type Against struct {
	Policy       string  `json:"policy"`
	StepMs       float64 `json:"step_ms"`          // mean step of the window as it is replayed under this policy; 0: it cannot be replayed
	SavedMs      float64 `json:"saved_ms"`         // how much longer this is than the replay under the policy in force; below 0: the policy in force is slower
	ErrorRatio   float64 `json:"error_ratio"`      // share of a step by which step_ms may be wrong, by chance or because the replay of the policy in force was
	Claimed      bool    `json:"claimed"`          // the difference is larger than its error and that of the policy in force; other differences are not added up
	SavedSeconds float64 `json:"saved_seconds"`    // time of steps that the policy in force saved since the start, where that was claimed
	LostSeconds  float64 `json:"lost_seconds"`     // time of steps that it lost, likewise
	Today        float64 `json:"rank_hours_today"` // rank-hours saved since midnight UTC: the saved time of steps times the ranks of the group; below 0: lost
	Hour         *Hour   `json:"hour,omitempty"`   // nil while too little is known
	Says         string  `json:"says"`             // the same in words
}

// Hour is the mean over the verdicts since the policy in force or the settings changed, over about an hour at most.
type Hour struct {
	AgeSeconds float64 `json:"age_seconds"` // time since the end of the traffic over which the mean was taken
	Seconds    float64 `json:"seconds"`     // length of that traffic, an hour at most: from then on, older traffic counts less and less
	StepMs     float64 `json:"step_ms"`     // mean step as replayed under this policy
	SavedMs    float64 `json:"saved_ms"`    // how much longer this is than the replay under the policy in force; below 0: the policy in force is slower
	ErrorRatio float64 `json:"error_ratio"` // share of a step by which step_ms may be wrong
}

// Say sets a.Says, the comparison in words. failed is why the policy could not be replayed; nil: it was.
func (a *Against) Say(t *Twin, failed error) {
	if failed != nil {
		a.Says = fmt.Sprintf("against %s: it cannot be replayed: %v", a.Policy, failed)
		return
	}
	word := func(v float64) string {
		if v < 0 {
			return "lost"
		}
		return "saved"
	}
	if a.Claimed {
		a.Says = fmt.Sprintf("against %s: %.1f ms of every %.0f ms step %s", a.Policy, math.Abs(a.SavedMs), t.StepMs, word(a.SavedMs))
		if math.Abs(a.Today) >= 0.05 {
			a.Says += fmt.Sprintf(", %.1f rank-hours %s today", math.Abs(a.Today), word(a.Today))
		}
	} else {
		a.Says = fmt.Sprintf("against %s: no difference beyond the twin's error of %.1f %% of a step", a.Policy,
			100*max(a.ErrorRatio, t.ErrorRatio))
	}
	if h := a.Hour; h != nil && h.Seconds > t.WindowSeconds {
		if wrong := h.ErrorRatio * h.StepMs; math.Abs(h.SavedMs) > wrong {
			a.Says += fmt.Sprintf("; over %.0f min: %.1f ms %s, with an error of %.1f ms", h.Seconds/60, math.Abs(h.SavedMs), word(h.SavedMs), wrong)
		} else {
			a.Says += fmt.Sprintf("; over %.0f min: no difference beyond the error of %.1f ms", h.Seconds/60, wrong)
		}
	}
}
