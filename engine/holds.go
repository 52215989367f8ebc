package engine

import "strings"

// Holds are the settings with which an SGLang server that prefills and decodes delays prompts, as
// GET /server_info reports them. Source: SGLang 0.5.23, managers/min_free_slots_delayer.py.
type Holds struct {
	Delays      bool   `json:"enable_prefill_delayer"`
	FreeSlots   Number `json:"min_free_slots_delay"` // prompts wait until a rank has so many free slots; null: the flag is not set
	Speculation string `json:"speculative_algorithm"`
	DecodeSteps Number `json:"prefill_decode_interval"` // so many steps after one that computes prompts compute none (managers/scheduler.py)
}

// Interval returns in every how many steps a busy server computes prompts, as
// --prefill-schedule-interval of vLLM counts; 1: in each one.
func (h *Holds) Interval() (steps int, err error) {
	between, err := h.DecodeSteps.Whole("prefill_decode_interval", MostStep)
	return between + 1, err
}

// Flags returns the flags of the start command that make the server delay prompts, each with a
// remedy. slots is how many requests a rank runs at once; 0: unknown.
func (h *Holds) Flags(slots int) (flags, remedies []string) {
	add := func(flag, remedy string) { flags, remedies = append(flags, flag), append(remedies, remedy) }
	if h.Delays {
		add("--enable-prefill-delayer", "start it without this flag")
	}
	const turnOff = "start it with --min-free-slots-delay 1"
	switch algorithm := strings.ToUpper(h.Speculation); {
	case h.FreeSlots == "": // this version has no such setting
	case h.FreeSlots == "null":
		// Without the flag, two algorithms turn the setting on if a rank has fewSlots or more.
		turnsOn := algorithm == "DFLASH" || algorithm == "DSPARK"
		mayHaveEnough := slots == 0 || slots >= fewSlots
		if turnsOn && mayHaveEnough {
			add("--speculative-algorithm "+algorithm+", which turns --min-free-slots-delay on", turnOff)
		}
	default:
		freeSlots, err := h.FreeSlots.Whole("min_free_slots_delay", MostRequests)
		if err == nil && freeSlots > 1 { // a prompt needs one free slot anyway, so 1 delays nothing
			add("--min-free-slots-delay "+string(h.FreeSlots), turnOff)
		}
	}
	return flags, remedies
}

// fewSlots is the least number of slots of a rank with which DFLASH and DSPARK turn
// --min-free-slots-delay on.
const fewSlots = 8
