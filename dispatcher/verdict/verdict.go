// Package verdict has the form in which users see the results of the twin (the replay of recent traffic under other policies): how long
// steps would have taken under each of them.
package verdict

import (
	"fmt"
	"math"
)

// Policies are the policies that the twin replays. In the config file, Off stands for an empty list.
type Policies []string

// Off is the word in the config file that stands for an empty list of policies.
const Off = "off"

// TakesWord says whether the config file may have this word in place of the list: only off, for no policies.
func (Policies) TakesWord(word string) bool { return word == Off }

// UnmarshalYAML reads a list of policies, or the word off, which gives an empty list.
func (t *Policies) UnmarshalYAML(read func(any) error) error {
	var list []string // stays empty for the word off
	if err := read(&list); err != nil {
		var word string
		if read(&word) != nil || word != Off { // the value is neither a list nor off
			return err
		}
	}
	*t = list
	return nil
}

// Twin says how long the steps of a group in the last minutes would have taken under other policies, by replays of its traffic.
type Twin struct {
	AgeSeconds    float64 `json:"age_seconds"`    // seconds since the end of the traffic (the window) that was replayed
	WindowSeconds float64 `json:"window_seconds"` // length of the replayed traffic in seconds, without its first part, which is not measured
	Policy        string  `json:"policy"`         // policy in force at the end of the window
	// mean length in ms of the real steps in the window, over all groups of the model, because the policy decides which group gets a
	// request
	StepMs     float64 `json:"step_ms"`
	TwinStepMs float64 `json:"twin_step_ms"` // mean length in ms of the steps in replays of the window under the policy in force
	// share of a step by which twin_step_ms may be wrong: twice the deviation of the last windows, or the deviation of this window if
	// it is larger
	ErrorRatio float64   `json:"error_ratio"`
	Replays    int       `json:"replays"` // number of replays of each policy; step lengths are means over them
	Against    []Against `json:"against"` // one comparison for each policy listed in dispatch.twin, except the policy in force
}

// Against compares the policy in force with another policy, by replays of the same minutes.
type Against struct {
	Policy string `json:"policy"`
	// mean length in ms of the steps in replays of the window under this policy; 0: it cannot be replayed
	StepMs  float64 `json:"step_ms"`
	SavedMs float64 `json:"saved_ms"` // how many ms shorter steps are under the policy in force, by the replays; below 0: longer
	// share of a step by which step_ms may be wrong, by chance or because the replay of the policy in force was wrong
	ErrorRatio float64 `json:"error_ratio"`
	// the difference can be relied on: it exceeds its own error and the error of the policy in force; only such differences are added
	// up
	Claimed bool `json:"claimed"`
	// seconds of step time that the policy in force has saved since the start; only claimed differences count
	SavedSeconds float64 `json:"saved_seconds"`
	// seconds of step time that the policy in force has lost since the start; only claimed differences count
	LostSeconds float64 `json:"lost_seconds"`
	// rank-hours saved since midnight UTC: the saved step time multiplied by the number of ranks of the group; below 0: lost
	Today float64 `json:"rank_hours_today"`
	Hour  *Hour   `json:"hour,omitempty"` // comparison over about the last hour; nil: too little traffic was replayed
	Says  string  `json:"says"`           // the comparison in words
}

// Hour is the comparison over the last hour at most, as a mean. It begins anew when the policy in force or the settings change.
type Hour struct {
	AgeSeconds float64 `json:"age_seconds"` // seconds since the end of the traffic that was compared
	// seconds of compared traffic, at most 3600; after an hour, older traffic counts less and less
	Seconds    float64 `json:"seconds"`
	StepMs     float64 `json:"step_ms"`     // mean length in ms of the steps in replays under this policy
	SavedMs    float64 `json:"saved_ms"`    // how many ms shorter steps are under the policy in force, by the replays; below 0: longer
	ErrorRatio float64 `json:"error_ratio"` // share of a step by which step_ms may be wrong
}

// Say sets a.Says, the comparison in words. failed says why the policy could not be replayed; nil: it was replayed.
func (a *Against) Say(t *Twin, failed error) {
	if failed != nil {
		a.Says = fmt.Sprintf("against %s: it cannot be replayed: %v", a.Policy, failed)
		return
	}
	a.Says = a.windowInWords(t) + a.hourInWords(t)
}

// windowInWords says how the policies differ in the window that was replayed, and how many rank-hours of step time the policy in force has
// saved or lost today. It says that there is no difference if the difference cannot be relied on, because it is not larger than the errors
// of the replays (Claimed is false).
func (a *Against) windowInWords(t *Twin) string {
	if !a.Claimed {
		return fmt.Sprintf("against %s: no difference beyond the twin's error of %.1f %% of a step", a.Policy,
			100*max(a.ErrorRatio, t.ErrorRatio))
	}
	words := fmt.Sprintf("against %s: %.1f ms of every %.0f ms step %s", a.Policy, math.Abs(a.SavedMs), t.StepMs, savedOrLost(a.SavedMs))
	if math.Abs(a.Today) >= 0.05 { // a smaller value would be printed as 0.0
		words += fmt.Sprintf(", %.1f rank-hours %s today", math.Abs(a.Today), savedOrLost(a.Today))
	}
	return words
}

// hourInWords says how the policies differ over the last hour; empty: no more traffic was compared than in the window, which windowInWords
// describes already.
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

// savedOrLost returns the word for a difference between the policies: lost if saved is below 0, because the policy in force is worse then.
func savedOrLost(saved float64) string {
	if saved < 0 {
		return "lost"
	}
	return "saved"
}
