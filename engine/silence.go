package engine

import (
	"errors"

	"evenkeel/sse"
)

// WasSilent says whether an engine took a request and then let a time limit pass, before its answer or within it.
func WasSilent(err error) bool {
	var ee *Error
	return errors.Is(err, sse.ErrSilent) || errors.As(err, &ee) && ee.Timeout && ee.Phase >= PhaseHead
}
