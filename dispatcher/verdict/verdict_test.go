package verdict

import (
	"errors"
	"testing"
)

func TestSay(t *testing.T) {
	for name, c := range map[string]struct {
		a      Against
		failed error
		want   string
	}{
		"saved":                       {Against{SavedMs: 3.14, Claimed: true, Today: 2.6}, nil, "against jsq-kv: 3.1 ms of every 44 ms step saved, 2.6 rank-hours saved today"},
		"lost":                        {Against{SavedMs: -1.2, Claimed: true, Today: -0.31}, nil, "against jsq-kv: 1.2 ms of every 44 ms step lost, 0.3 rank-hours lost today"},
		"lost lately, saved today":    {Against{SavedMs: -1.2, Claimed: true, Today: 4}, nil, "against jsq-kv: 1.2 ms of every 44 ms step lost, 4.0 rank-hours saved today"},
		"today is too little to tell": {Against{SavedMs: 3.14, Claimed: true, Today: 0.04}, nil, "against jsq-kv: 3.1 ms of every 44 ms step saved"},
		"within the error":            {Against{SavedMs: 0.3, ErrorRatio: 0.008, Today: 2.6}, nil, "against jsq-kv: no difference beyond the twin's error of 0.8 % of a step"},
		"over more than the window":   {Against{SavedMs: 3.14, Claimed: true, Today: 2.6, Hour: &Hour{100, 3120, 47, 3.02, 0.0085}}, nil, "against jsq-kv: 3.1 ms of every 44 ms step saved, 2.6 rank-hours saved today; over 52 min: 3.0 ms saved, with an error of 0.4 ms"},
		"only over more":              {Against{ErrorRatio: 0.015, Hour: &Hour{100, 3600, 43, -0.9, 0.0085}}, nil, "against jsq-kv: no difference beyond the twin's error of 1.5 % of a step; over 60 min: 0.9 ms lost, with an error of 0.4 ms"},
		"no difference over more":     {Against{ErrorRatio: 0.015, Hour: &Hour{100, 3600, 44, 0.3, 0.0085}}, nil, "against jsq-kv: no difference beyond the twin's error of 1.5 % of a step; over 60 min: no difference beyond the error of 0.4 ms"},
		"of no more than the window":  {Against{SavedMs: 3.14, Claimed: true, Hour: &Hour{100, 240, 47, 3.02, 0.0085}}, nil, "against jsq-kv: 3.1 ms of every 44 ms step saved"},
		"it failed":                   {Against{Claimed: true}, errors.New("the policy failed"), "against jsq-kv: it cannot be replayed: the policy failed"},
	} {
		t.Run(name, func(t *testing.T) {
			c.a.Policy = "jsq-kv"
			c.a.Say(&Twin{WindowSeconds: 240, StepMs: 43.9, ErrorRatio: 0.008}, c.failed)
			if c.a.Says != c.want {
				t.Errorf("Say = %q; want %q", c.a.Says, c.want)
			}
		})
	}
}
