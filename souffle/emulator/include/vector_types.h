// Everything this header offers to device code is in the prelude.
#pragma once
