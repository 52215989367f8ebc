// Package verdict has the form in which users see the results of the twin: how long steps would have taken under other policies.
package verdict

import (
	"fmt"
	"math"
)

// Policies are the policies that the twin replays. In the config file, Off stands for an empty list.
type Policies []string

// Off is the word in the config file that stands for an empty list of policies.
const Off = "off"

// TakesWord says whether the config file may have this word in place of the list.
func (Policies) TakesWord(word string) bool { return word == Off }

// UnmarshalYAML reads a list of policies, or off.
func (t *Policies) UnmarshalYAML(read func(any) error) error {
	var list []string
	if err := read(&list); err != nil {
		var word string
		if read(&word) != nil || word != Off { // neither a list nor off
			return err
		}
	}
	*t = list
	return nil
}

// Twin says how long the steps of the last minutes of a group would have taken under other policies.
type Twin struct {
	AgeSeconds    float64   `json:"age_seconds"`    // since the end of the window that was replayed
	WindowSeconds float64   `json:"window_seconds"` // length of the window without its first part, which is not measured
	Policy        string    `json:"policy"`         // in force at the end of the window
	StepMs        float64   `json:"step_ms"`        // mean length of the real steps in the window, over all groups of the model, because the policy decides which group gets a request
	TwinStepMs    float64   `json:"twin_step_ms"`   // mean length of the steps in a replay of the window under the policy in force
	ErrorRatio    float64   `json:"error_ratio"`    // share of a step by which this replay may be wrong: twice the deviation of the last windows, or the deviation of this window if it is larger
	Replays       int       `json:"replays"`        // number of replays of each policy; the figures are means over them
	Against       []Against `json:"against"`        // one for each other policy of dispatch.twin
}

// Against compares the policy in force with another policy, by replays of the same minutes.
type Against struct {
	Policy       string  `json:"policy"`
	StepMs       float64 `json:"step_ms"`          // mean length of the steps in a replay of the window under this policy; 0: it cannot be replayed
	SavedMs      float64 `json:"saved_ms"`         // by how much the policy in force makes steps shorter, by the replays; below 0: longer
	ErrorRatio   float64 `json:"error_ratio"`      // share of a step by which step_ms may be wrong, by chance or because the replay of the policy in force was wrong
	Claimed      bool    `json:"claimed"`          // the difference is larger than its own error and the error of the policy in force; other differences are not added up
	SavedSeconds float64 `json:"saved_seconds"`    // time of steps that the policy in force has saved since the start, by the claimed differences
	LostSeconds  float64 `json:"lost_seconds"`     // time of steps that the policy in force has lost since the start, by the claimed differences
	Today        float64 `json:"rank_hours_today"` // rank-hours saved since midnight UTC: the saved time of steps times the ranks of the group; below 0: lost
	Hour         *Hour   `json:"hour,omitempty"`   // nil while too little is known
	Says         string  `json:"says"`             // the comparison in words
}

// Hour is the mean over the verdicts since the policy in force or the settings changed, over about an hour at most.
type Hour struct {
	AgeSeconds float64 `json:"age_seconds"` // time since the end of the traffic over which the mean was taken
	Seconds    float64 `json:"seconds"`     // length of this traffic, an hour at most; after an hour, older traffic counts less and less
	StepMs     float64 `json:"step_ms"`     // mean length of the steps in replays under this policy
	SavedMs    float64 `json:"saved_ms"`    // by how much the policy in force makes steps shorter, by the replays; below 0: longer
	ErrorRatio float64 `json:"error_ratio"` // share of a step by which step_ms may be wrong
}

// Say sets a.Says, the comparison in words. failed is the reason why the policy could not be replayed; nil: it was replayed.
func (a *Against) Say(t *Twin, failed error) {
	if failed != nil {
		a.Says = fmt.Sprintf("against %s: it cannot be replayed: %v", a.Policy, failed)
		return
	}
	a.Says = a.windowInWords(t) + a.hourInWords(t)
}

// windowInWords says how the policies differ in the window that was replayed, and today.
func (a *Against) windowInWords(t *Twin) string {
	if !a.Claimed {
		return fmt.Sprintf("against %s: no difference beyond the twin's error of %.1f %% of a step", a.Policy,
			100*max(a.ErrorRatio, t.ErrorRatio))
	}
	words := fmt.Sprintf("against %s: %.1f ms of every %.0f ms step %s", a.Policy, math.Abs(a.SavedMs), t.StepMs, savedOrLost(a.SavedMs))
	if math.Abs(a.Today) >= 0.05 { // less would read as 0.0
		words += fmt.Sprintf(", %.1f rank-hours %s today", math.Abs(a.Today), savedOrLost(a.Today))
	}
	return words
}

// hourInWords says how the policies differ over the last hour; "": no more traffic than that of the window is known.
func (a *Against) hourInWords(t *Twin) string {
	h := a.Hour
	if h == nil || h.Seconds <= t.WindowSeconds {
		return ""
	}
	minutes, errorMs := h.Seconds/60, h.ErrorRatio*h.StepMs
	if math.Abs(h.SavedMs) > errorMs {
		return fmt.Sprintf("; over %.0f min: %.1f ms %s, with an error of %.1f ms", minutes, math.Abs(h.SavedMs), savedOrLost(h.SavedMs), errorMs)
	}
	return fmt.Sprintf("; over %.0f min: no difference beyond the error of %.1f ms", minutes, errorMs)
}

// savedOrLost returns the word for a difference between the policies; below 0: the policy in force is worse.
func savedOrLost(saved float64) string {
	if saved < 0 {
		return "lost"
	}
	return "saved"
}
