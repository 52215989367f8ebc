package engine

import (
	"errors"

	"evenkeel/sse"
)

// WasSilent says whether an engine took a request and then sent nothing within a time limit, either at first or in the middle of
// its answer.
func WasSilent(err error) bool {
	var ee *Error
	return errors.Is(err, sse.ErrSilent) || errors.As(err, &ee) && ee.Timeout && ee.Phase >= PhaseHead
}
